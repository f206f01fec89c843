"""How many of a global batch's rows each rank takes: as many, in given shares, or by speed.

Speed is measured as the loop runs: rows over the seconds between two batches, less what this rank
has waited for others. Every 16 steps ranks tell each other theirs, 24 bytes to every other rank.
New shares begin with the first batch that no rank has cut yet, so all cut alike.
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

_FIRST, _EVERY = 5, 16  # steps of a pass, after which ranks tell their speeds
_PURPOSE = "shard: comparing speeds"
_LEAST, _MOST = 1e-6, 1e6  # smallest and largest share


def _numbers(shares: Any) -> list[float]:
    """Return shares as numbers; none if they are anything else."""
    if isinstance(shares, str | bytes | Mapping):
        return []
    try:
        shares = list(shares)
        return [] if any(isinstance(s, str | bool) for s in shares) else [float(s) for s in shares]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # also of tensors
        return []


class Shares:
    """As many rows on every rank."""

    even = True

    def at(self, epoch: int, turn: int) -> Sequence[float] | None:
        """The shares of a global batch, the same on every rank; None where they are even.

        Args:
            epoch: in which it is.
            turn: its number in the pass.
        """
        return None

    def asked(self, num_steps: int) -> None:
        """The loop asks for a batch; so many steps of the pass were trained on."""

    def given(self, batch: Any) -> None:
        """It gets one."""


@final
class FixedShares(Shares):
    """The same shares for every batch."""

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
        """Those given."""
        return self._shares


@final
class Speed(Shares):
    """By the measured speed of each rank.

    Args:
        comm: the ranks.
        passes: tell what the main thread has waited for other ranks.
        clock: gives seconds.
    """

    even = False

    def __init__(
        self, comm: Comm, passes: Passes, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._comm = comm.channel("speeds") if comm.size > 1 else None
        self._passes, self._clock = passes, clock
        self._begin: tuple[int, int] = (0, 0)  # epoch and turn that no rank's cut is behind
        self._shares: list[tuple[tuple[int, int], list[float]]] = []  # and from where they hold
        self._given: tuple[float, float, int] | None = None
        self._rows, self._seconds = 0, 0.0

    def at(self, epoch: int, turn: int) -> Sequence[float] | None:
        """Those that ranks agreed upon for this batch."""
        self._begin = max(self._begin, (epoch, turn + 1))
        holding = [shares for begin, shares in self._shares if begin <= (epoch, turn)]
        return holding[-1] if holding else None

    def asked(self, num_steps: int) -> None:
        """The loop asks for a batch, and has trained on the last one."""
        if self._comm is None or not num_steps:
            self._given = None
            return
        if self._given is not None:
            begin_s, waited_s, rows = self._given
            self._rows += rows
            self._seconds += self._clock() - begin_s - (self._passes.waited_s() - waited_s)
        self._given = None
        if num_steps == 1:  # which warms up
            self._rows, self._seconds = 0, 0.0
        if num_steps == _FIRST or num_steps % _EVERY == 0:
            self._agree(self._comm)

    def given(self, batch: Any) -> None:
        """The loop gets one."""
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
