"""Streams of which each rank has its own: they end the epoch together.

Nobody knows another rank's end before it comes. So each rank tells the others, beside the step
before, whether it has a batch for the next one: 24 bytes to every other rank, for which nobody
waits as a rule. The first batch is given without a word, so that a rank may look at one alone.

    step    0         1                  2              …
    has     batch     batch, asks: 2?    batch, asks: 3?

Where one has ended, the epoch ends on all, and ranks say what they leave.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, final

import torch

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.passes import Passes
from shoal.data.deal import Deal
from shoal.data.source import Fetch, LoaderStep, Source

T = TypeVar("T")
_END: Any = object()
_PURPOSE = "shard: has every rank a batch?"


@final
class NextBatchCheck:
    """The ranks' check, over a channel of its own, whether each has a batch for the next step."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm.channel("streams") if comm.size > 1 else None
        self._asked: Callable[[], list[bool]] | None = None

    def ask(self, epoch: int, step: int, has: bool) -> Callable[[], list[bool]]:
        """Start telling whether this rank has a batch; what it gives waits for the others."""
        comm = self._comm
        if comm is None:
            return lambda: [has]
        if self._asked is not None:
            self._asked()  # of a pass that was left
        comm.begins(_PURPOSE)
        own = torch.tensor([epoch, step, has], device="cpu")
        told = [torch.empty_like(own) for _ in range(comm.size)]
        finish = comm.start_all_to_all(told, [own] * comm.size)
        found: list[bool] = []

        def answer() -> list[bool]:
            if not found:
                finish()
                found.extend(self._compared(comm, own, told))
                self._asked = None
            return found

        self._asked = answer
        return answer

    @staticmethod
    def _compared(comm: Comm, own: torch.Tensor, told: list[torch.Tensor]) -> list[bool]:
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
class Streams(Source[T]):
    """Rows or batches of this rank's own stream."""

    kind = "a stream on each rank"

    def __init__(
        self, loader: Any, deal: Deal, seed: int, passes: Passes, next_batch: NextBatchCheck
    ) -> None:
        super().__init__(deal, seed, passes)
        self._loader, self._next_batch = loader, next_batch
        self._behind: Any = None  # the dataset's own state behind the last batch

    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """A pass over what is left of the stream."""
        dataset = getattr(self._loader, "dataset", self._loader)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self.epoch)
        return self._together(fetch(), self.epoch, sum(self.start))

    def _together(self, batches: Iterator[Any], epoch: int, taken: int) -> Iterator[LoaderStep[T]]:
        step, batch = 0, next(batches, _END)
        if batch is _END and not taken:
            raise UsageError(
                "the stream of this rank is empty",
                where=f"rank {self.deal.rank}, epoch {epoch}",
                do="give every rank rows: in its own part of the stream, at least one",
            )
        answer: Callable[[], list[bool]] | None = None
        while True:
            if step or taken:
                answer = answer or self._next_batch.ask(epoch, step, batch is not _END)
                have = answer()
                if not all(have):
                    self._leave(have, step, epoch, batch)
                    return
            self._note()
            coming = _END
            if step:
                coming = next(batches, _END)
                answer = self._next_batch.ask(epoch, step + 1, coming is not _END)
            yield LoaderStep(batch, [taken + step + 1])
            if not step:
                coming = next(batches, _END)
            step, batch = step + 1, coming

    def _leave(self, have: list[bool], step: int, epoch: int, batch: Any) -> None:
        if batch is not _END:
            ended = have.index(False)
            warnings.warn(
                f"rank {self.deal.rank} leaves rows of its stream in epoch {epoch}: the stream of "
                f"rank {ended} has ended after {step} batches. Give ranks streams of one length, "
                "or one stream that all of them read: shard(loader) without shards_itself",
                stacklevel=6,
            )

    def _note(self) -> None:
        if (keeper := self._keeper()) is not None:
            self._behind = keeper.state_dict()

    def _keeper(self) -> Any:
        """Who knows where this rank's stream is, in this process."""
        dataset = getattr(self._loader, "dataset", self._loader)
        workers = getattr(self._loader, "num_workers", 0)
        known = all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))
        return dataset if known and not workers else None

    def num_steps(self) -> int:
        """Nobody knows it."""
        raise TypeError("the length of streams is not known: count steps as you go")

    def facts(self) -> str:
        """What there is to know."""
        return "a stream on each rank"

    def state(self) -> dict[str, Any]:
        """Where this rank's stream is, by the dataset's own state."""
        state = super().state()
        if state["position"]:
            if self._keeper() is None:
                raise UsageError(
                    "a dataset that shards itself cannot say where it is",
                    got=f"{type(self._loader).__name__} without a state in this process",
                    do="give the dataset state_dict() and load_state_dict(), with num_workers=0, "
                    "or save between epochs",
                )
            state |= {"rank": self.deal.rank, "size": self.deal.size, "own": self._behind}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the dataset's own state, on as many ranks."""
        super().load(state)
        if not self.start:
            return
        keeper = self._keeper()
        at, size = state.get("rank"), state.get("size")
        if keeper is None or (at, size) != (self.deal.rank, self.deal.size):
            self.set_epoch(self.epoch)
            raise UsageError(
                "streams that shard themselves go on where they were on as many ranks only, each "
                "from its own state",
                got=f"the state of rank {at} of {size}",
                expected=f"that of rank {self.deal.rank} of {self.deal.size}, for a dataset with "
                "load_state_dict()",
                do="start as many ranks, and save and load the state of each, or begin an epoch: "
                "loader.set_epoch(epoch)",
            )
        keeper.load_state_dict(state["own"])
        self._behind = state["own"]

    def check(self, order: int) -> None:
        """Nothing is known before it is read."""
