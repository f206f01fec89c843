"""Rows of a global batch that each rank takes: equally many, in given shares, or by speed.

Speed is measured as the loop runs: rows over the seconds between two batches, without this rank's
waits for others. Every 16 steps ranks tell each other their speeds, 24 bytes to every other rank.
New shares begin with the first batch that no rank has cut yet, so all ranks cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, final

import torch

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.numbers import how_many, shown
from shoal.core.passes import Passes
from shoal.data.parts import num_rows

_FIRST, _EVERY = 5, 16  # steps of a pass after which ranks tell their speeds
_PURPOSE = "shard: comparing speeds"
_LEAST, _MOST = 1e-6, 1e6  # smallest and largest share


def _numbers(shares: Any) -> list[float]:
    """Return shares as numbers; an empty list if they are anything else."""
    if isinstance(shares, str | bytes | Mapping):
        return []
    try:
        shares = list(shares)
        return [] if any(isinstance(s, str | bool) for s in shares) else [float(s) for s in shares]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # tensors raise these too
        return []


class Shares:
    """Equally many rows on every rank."""

    even = True

    def at(self, epoch: int, turn: int) -> Sequence[float] | None:
        """Return the shares of a global batch, the same on every rank; None if they are even.

        Args:
            epoch: number of its epoch.
            turn: its number in the pass.
        """
        return None

    def asked(self, num_steps: int) -> None:
        """Note that the loop asks for a batch, and how many steps of the pass have trained."""

    def given(self, batch: Any) -> None:
        """Note that the loop gets a batch."""


@final
class FixedShares(Shares):
    """Fixed shares for every batch, as the user gives them."""

    even = False

    def __init__(self, shares: Sequence[float], size: int) -> None:
        numbers = _numbers(shares)
        if len(numbers) != size or not all(_LEAST <= share <= _MOST for share in numbers):
            raise UsageError(
                "shares are one positive number a rank",
                got=f"{shown(shares)} for {how_many(size, 'rank')}",
                expected=f"{how_many(size, 'number')} from {_LEAST:g} to {_MOST:g}",
                do='give as many as there are ranks, such as [1, 3], or shares="speed"',
            )
        self._shares = numbers

    def at(self, epoch: int, turn: int) -> Sequence[float] | None:
        """Return the user's shares."""
        return self._shares


@final
class Speed(Shares):
    """Shares by the measured speed of each rank.

    Args:
        comm: the ranks.
        passes: they tell how long the main thread has waited for other ranks.
        clock: returns seconds.
    """

    even = False

    def __init__(
        self, comm: Comm, passes: Passes, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._comm = comm.channel("speeds") if comm.size > 1 else None
        self._passes, self._clock = passes, clock
        self._begin: tuple[int, int] = (0, 0)  # epoch and turn that no rank has cut yet
        self._shares: list[tuple[tuple[int, int], list[float]]] = []  # begin of each, and shares
        self._given: tuple[float, float, int] | None = None
        self._rows, self._seconds = 0, 0.0

    def at(self, epoch: int, turn: int) -> Sequence[float] | None:
        """Return the shares that ranks agreed on for this batch."""
        self._begin = max(self._begin, (epoch, turn + 1))
        holding = [shares for begin, shares in self._shares if begin <= (epoch, turn)]
        return holding[-1] if holding else None

    def asked(self, num_steps: int) -> None:
        """Note that the loop asks for a batch, and has trained on the last one."""
        if self._comm is None or not num_steps:
            self._given = None
            return
        if self._given is not None:
            begin_s, waited_s, rows = self._given
            self._rows += rows
            self._seconds += self._clock() - begin_s - (self._passes.waited_s() - waited_s)
        self._given = None
        if num_steps == 1:  # the first step only warms up
            self._rows, self._seconds = 0, 0.0
        if num_steps == _FIRST or num_steps % _EVERY == 0:
            self._agree(self._comm)

    def given(self, batch: Any) -> None:
        """Note when the loop gets a batch, and its rows."""
        self._given = self._clock(), self._passes.waited_s(), num_rows(batch)

    def _agree(self, comm: Comm) -> None:
        speed = self._rows / self._seconds if self._seconds > 0 else 0.0
        self._rows, self._seconds = 0, 0.0
        comm.journal.begins(_PURPOSE)
        own = torch.tensor([speed, *self._begin], dtype=torch.float64, device="cpu")
        received = [torch.empty_like(own) for _ in range(comm.size)]
        comm.all_to_all(received, [own] * comm.size)
        told = [tensor.tolist() for tensor in received]
        speeds = [speed for speed, _, _ in told]
        if all(speeds):
            begin = max((int(epoch), int(turn)) for _, epoch, turn in told)
            self._shares = [*self._shares[-_EVERY:], (begin, speeds)]
