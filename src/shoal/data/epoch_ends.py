"""Ranks with batches of their own end an epoch together.

A rank cannot know another rank's end before it comes. So each rank tells the others, during the
step before, whether it has a batch for the next one. This takes 24 bytes to every other rank, and
usually no rank waits for it. Ranks give their first batch without telling, so that a rank may look
at one alone.

    step    0         1                  2              …
    has     batch     batch, asks: 2?    batch, asks: 3?

If one rank has ended, the epoch ends on all, and ranks warn that they leave rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.data.source import LoaderStep

T = TypeVar("T")
_PURPOSE = "shard: has every rank a batch?"


@final
class NextBatchCheck:
    """The ranks' check, over a channel of its own, that each has a batch for the next step."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.channel("streams") if comm.size > 1 else None
        self._asked: Callable[[], list[bool]] | None = None

    def ask(self, epoch: int, step: int, has: bool) -> Callable[[], list[bool]]:
        """Start telling others whether this rank has a batch; the result waits for answers."""
        comm = self._comm
        if comm is None:
            return lambda: [has]
        if self._asked is not None:
            self._asked()  # answer for a pass that was left
        comm.journal.begins(_PURPOSE)
        own = torch.tensor([epoch, step, has], device="cpu")
        told = [torch.empty_like(own) for _ in range(comm.size)]
        finish = comm.start_all_to_all(told, [own] * comm.size)
        found: list[bool] = []

        def answer() -> list[bool]:
            if not found:
                finish()
                found.extend(self._compare(comm, own, told))
                self._asked = None
            return found

        self._asked = answer
        return answer

    @staticmethod
    def _compare(comm: Comm, own: torch.Tensor, told: list[torch.Tensor]) -> list[bool]:
        for rank, theirs in enumerate(told):
            if not torch.equal(theirs[:2], own[:2]):
                (epoch, step), (own_epoch, own_step) = theirs[:2].tolist(), own[:2].tolist()
                raise RanksDiffer(
                    f"rank {rank} is at another batch of its stream than rank {comm.rank}",
                    got=f"rank {rank}: batch {step} of epoch {epoch}",
                    expected=f"as on rank {comm.rank}: batch {own_step} of epoch {own_epoch}",
                    do="take as many batches on every rank",
                    rank=rank,
                )
        return [bool(theirs[2]) for theirs in told]


@final
@dataclass(frozen=True)
class OwnEnds:
    """The end of an epoch for this rank, if each rank has batches of its own.

    Args:
        rank: this rank.
        size: number of ranks.
        next_batch: the check among all ranks.
        alone: another way, by which all ranks share one source, in words.
    """

    rank: int
    size: int
    next_batch: NextBatchCheck
    alone: str

    def together(
        self, steps: Iterator[LoaderStep[T]], epoch: int, *, is_start: bool
    ) -> Iterator[LoaderStep[T]]:
        """Yield this rank's steps, as many as every rank has."""
        number, step = 0, next(steps, None)
        if step is None and is_start:
            raise UsageError(
                "the stream of this rank is empty",
                where=f"rank {self.rank}, epoch {epoch}",
                do="give every rank rows: in its own part of the stream, at least one",
            )
        answer: Callable[[], list[bool]] | None = None
        while True:
            if number or not is_start:
                answer = answer or self.next_batch.ask(epoch, number, step is not None)
                have, answer = answer(), None
                if not all(have):
                    if step is not None:
                        self._warn(have.index(False), number, epoch)
                    return
            assert step is not None
            coming = None
            if number:
                coming = next(steps, None)
                answer = self.next_batch.ask(epoch, number + 1, coming is not None)
            yield replace(step, digest=0, end=0, last=False)  # ranks have different ones
            if not number:
                coming = next(steps, None)
            number, step = number + 1, coming

    def _warn(self, ended: int, number: int, epoch: int) -> None:
        warnings.warn(
            f"rank {self.rank} leaves rows of its stream in epoch {epoch}: the stream of "
            f"rank {ended} has ended after {number} batches. Give ranks streams of one length, "
            f"or {self.alone}",
            stacklevel=6,
        )
