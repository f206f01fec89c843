"""Attendance: whether all ranks come to a call, and the values for a rank that is alone.

Why here: parameters, layers and outputs that are divided among ranks ask for it, and the engine
answers (engine/attendance.py).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

READING_BYTES = 56  # a statement of a rank at a reading of an output, to every other rank


class Wanted(IntEnum):
    """The values that a rank needs if it is alone."""

    NOTHING = 0
    PARAMETERS = 1
    STATES = 2  # optimizers' states, for parameters that are cut
    OWNED = 3  # optimizers' states, for parameters that have owners
    CHANGING = 4  # states that other ranks may be changing now, so that none can give them
    OUTPUT = 5  # an output that all ranks have computed


class MainWait(IntEnum):
    """Wait of a rank's main thread, other than at a meeting."""

    NONE = 0
    ELSEWHERE = 1
    FOR_READERS = 2  # waits for a rank at the meeting, so that it cannot come before


@dataclass(frozen=True)
class OutputKey:
    """The call of a layer that has made an output; the same on every rank."""

    layer: str
    call: int

    @property
    def words(self) -> tuple[int, int]:
        """Two numbers that stand for it in a message."""
        digest = hashlib.blake2b(self.layer.encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little"), self.call

    def __str__(self) -> str:
        return f"output of {self.layer}, call {self.call}"


class SharedOutput(ABC):
    """The values that this rank has of an output, for a rank that reads it alone.

    Args:
        key: the call that made it.
    """

    def __init__(self, key: OutputKey) -> None:
        self.key = key

    def __str__(self) -> str:
        return str(self.key)

    @abstractmethod
    def given(self, reader: int) -> Sequence[Tensor]:
        """Return all that this rank has of a reader's rows."""

    @abstractmethod
    def coming(self) -> Mapping[int, Sequence[Tensor]]:
        """Return empty tensors for all that other ranks give this one, by rank."""

    @abstractmethod
    def joined(self, coming: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        """Return the values of this rank's rows, given all that has come."""

    def dropped(self) -> None:
        """Forget its readings: the layer is called again."""
        return


class Reading(NamedTuple):
    """The way in which a rank reads an output.

    If both are None, ranks have come to read it in unlike ways.
    """

    told: list[int] | None = None  # all ranks read it together, and have told these numbers
    values: list[Tensor] | None = None  # this rank alone reads it, and has these values of its rows


class Attendance(ABC):
    """The ranks' attendance at calls that all make together, or one alone."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of this rank's steps so far."""

    @abstractmethod
    def numbers(
        self, numbers: Sequence[int], purpose: str, wanted: Wanted = Wanted.PARAMETERS
    ) -> list[int] | None:
        """Tell rank r `numbers[r]`, as `Comm.numbers` does, if all ranks come here.

        Args:
            numbers: one for each rank; empty if ranks have none to tell.
            purpose: the call, in the same words on every rank.
            wanted: the values that this rank needs if it is alone.

        Returns:
            The numbers that every rank told this one. None: this rank is alone, and the
            values that it wanted are here.

        Raises:
            WorldError: a rank is gone.
            UsageError: the parameters do not fit in memory.
            RanksDiffer: another rank has changed its parameters since.
        """

    @abstractmethod
    def keep(self) -> None:
        """Note the parameters that are cut now, to serve them also when the model is gone."""

    @abstractmethod
    def whole(self, key: Any) -> Tensor:
        """Return a whole parameter by its cut, or a whole state by the part of it.

        This rank was found alone. The tensor must not change.
        """

    @abstractmethod
    def state(self, owned: Any) -> Any:
        """Return the whole states of an optimizer's owned part, which this rank has read alone."""

    @abstractmethod
    def output_key(self, layer: str) -> OutputKey:
        """Return the key of the output that all ranks make of a layer now."""

    @abstractmethod
    def share(self, output: SharedOutput) -> None:
        """Give an output to ranks that read it alone, as long as this rank has it."""

    @abstractmethod
    def hold(self, output: SharedOutput) -> None:
        """Have it, until `drop`: the model has returned it, so that other ranks may read it."""

    @abstractmethod
    def drop(self, layer: str) -> None:
        """Hold an earlier output of a layer no more: all ranks call the layer again."""

    @abstractmethod
    def read(
        self, output: SharedOutput, purpose: str, numbers: Sequence[int], *, trains: bool
    ) -> Reading:
        """Meet the other ranks before an output is read.

        Args:
            output: this rank's part of it.
            purpose: the reading, in the same words on every rank.
            numbers: the number to tell each rank if all come.
            trains: whether a gradient may come back. Then a rank is alone only if it is certain
                that another one cannot come.

        Raises:
            WorldError: a rank is gone.
            RanksDiffer: another rank has the output no more.
        """

    @abstractmethod
    def changing(self) -> AbstractContextManager[None]:
        """Return a context in which this rank changes its parameters between two steps."""

    @abstractmethod
    def step_begins(self) -> None:
        """Keep parts from being read until `step_ends`. Each part of an optimizer calls both."""

    @abstractmethod
    def step_ends(self) -> None:
        """Let parts be read, which have changed, once all have called it.

        Further calls do nothing.
        """
