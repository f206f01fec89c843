"""Attendance: whether all ranks come to a call, and the whole parameters for a rank that is alone.

Why here: parameters and layers of which each rank has a part ask for it, and the engine serves it
(engine/attendance.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any

from torch import Tensor


class Wanted(IntEnum):
    """The values that a rank needs if it is alone."""

    NOTHING = 0
    PARAMETERS = 1
    STATES = 2  # optimizers' states, for parameters that are cut
    OWNED = 3  # optimizers' states, for parameters that have owners
    CHANGING = 4  # states that other ranks may be changing now, so that none can give them


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
