"""One stream, the same on every rank: each reads all of it and keeps its part of a global batch.

    stream     0 1 2 3 | 4 5 6 7 | 8 9 …      2 ranks of 2 rows
    rank 0     0 1     | 4 5     |
    rank 1         2 3 |     6 7 |

A stream's end is known only when it comes. So the last rows (fewer than two global batches) are not
cut where they are read, but go to the main process as they are, which cuts them so that every rank
has some. Batches that are made already are cut likewise: if the last ones have too few rows, they
are joined with the batches of the step before.

Random numbers that a stream draws from torch, random and numpy start at the same seed on every
rank.

**Workers.** A dataset that calls `get_worker_info()` gives each worker a stream of its own. Each
stream is dealt by itself, and their last rows together. A dataset that does not call it would give
all workers the same rows. Here it is one stream, and each worker takes some global batches: the
order is the same as without workers. Guarded by tests/data/test_stream.py.

Costs reading and decoding the whole stream on every rank, and no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar, final

from torch.utils.data._utils import worker as torch_worker

from shoal.core.errors import UsageError
from shoal.core.passes import Passes
from shoal.core.pieces import cut_sizes
from shoal.core.random_state import mix_seeds
from shoal.data.deal import Deal, global_batches, last_batches, shared_by
from shoal.data.parts import digest_of, joined, num_rows, part
from shoal.data.pass_listener import ToldDataset, next_part
from shoal.data.random_numbers import OwnRandom, drawing_at, seed_worker
from shoal.data.rows import own_part
from shoal.data.source import Fetch, LoaderStep, Position, Source, other_order
from shoal.data.worker_info import begin

T = TypeVar("T")
Collate = Callable[[Any], Any]
_LOOKED_AT = 256  # elements of a row that go into the digest which ranks compare
_SHARDS = ("id", "num_workers", "dataset")  # the stream is divided by a dataset that reads these


@final
@dataclass(frozen=True)
class Units:
    """The units of a stream: rows, from which batches are made, or whole batches."""

    rows: int | None  # rows of all ranks in a step; None if units are batches
    drop_last: bool
    collate: Collate  # makes a batch of a list of rows, or of one batch

    def each(self, deal: Deal) -> int:
        """Return the number of units in a global batch."""
        return self.rows or (1 if deal.together else deal.size)

    def ahead(self, deal: Deal) -> int:
        """Units that must follow a global batch, so that it is not one of the last.

        Batches may be joined with the step before, so there must be more of them than in a step.
        """
        return deal.size if self.rows else max(2, self.each(deal))

    def own(self, units: list[Any], deal: Deal, epoch: int, turn: int) -> Any:
        """Make this rank's batch of a global batch."""
        if self.rows:
            return self.collate(deal.mine(units, epoch, turn))
        if len(units) > self.each(deal):
            batch = joined([self.collate(unit) for unit in units])
            return part(batch, *deal.span(num_rows(batch), epoch, turn))
        which = 0 if deal.together else shared_by(len(units), deal)[0]
        return own_part(self.collate(units[which]), len(units), deal, epoch, turn)

    def sizes(self, units: list[Any], deal: Deal, is_start: bool) -> list[int]:
        """Return how the last units make global batches, in which each rank has a row.

        Batches with too few rows for the ranks that share them are joined with the ones before.
        """
        sizes = self.last(len(units), deal, is_start)
        if self.rows or len(sizes) < 2 or self._suffice(units[-sizes[-1] :], deal):
            return sizes
        return [*sizes[:-2], sum(sizes[-2:])]

    def _suffice(self, units: list[Any], deal: Deal) -> bool:
        """Return whether batches have a row for each of the ranks that share them."""
        if deal.size == 1 or (len(units) == deal.size and not deal.together):
            return True
        sharing = cut_sizes(deal.size, len(units))
        pairs = zip(sharing, units, strict=True)
        return all(num <= num_rows(self.collate(unit)) for num, unit in pairs)

    def last(self, num_units: int, deal: Deal, is_start: bool) -> list[int]:
        """Divide the last units into global batches; return their sizes."""
        if self.rows:
            rows, drop_last = self.rows, self.drop_last
            return last_batches(num_units, deal.size, rows, drop_last, is_start=is_start)
        if not num_units:
            if not is_start:
                return []
            global_batches(0, deal.size, deal.size, drop_last=False)
        full, rest = divmod(num_units, self.each(deal))
        return [self.each(deal)] * full + ([rest] if rest else [])


class WorkerBatch(NamedTuple):
    """A batch from a worker to the main process: a plain tuple, so that tensors can be pinned."""

    part: int  # part of the stream: the worker's number if it has a stream of its own
    parts: int
    num: int  # number of units
    order: int  # digest of the epoch's first unit
    digest: int  # digest of the first row of this global batch
    is_last: bool  # whether the batch is a list of units that the main process must cut
    batch: Any


@final
class Dealt(ToldDataset[WorkerBatch]):
    """One rank's part of a stream, as a dataset for torch's workers."""

    def __init__(self, dataset: Iterable[Any], deal: Deal, units: Units) -> None:
        super().__init__(dataset)
        self.deal, self.units = deal, units

    def __iter__(self) -> Iterator[WorkerBatch]:
        seed, epoch, start = self.told()
        worker = torch_worker._worker_info
        if isinstance(worker, ObservedWorkerInfo):
            worker.begin(mix_seeds(seed, epoch), next_part(start))
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        random = OwnRandom(seed + epoch)
        with random.drawing():
            stream = iter(self.dataset)
            first = list(islice(stream, 1))
        part, parts, workers, number = 0, 1, 1, 0
        if isinstance(worker, ObservedWorkerInfo):
            number, workers = worker.id_, worker.num_workers_
            if worker.shards:
                part, parts = worker.part, workers
                random.reseed(mix_seeds(seed, epoch, part))
        if start and len(start) != parts:
            raise other_order(f"a stream of {parts} parts", f"of {len(start)}, a worker each")
        at = start[part] if start else 0
        turns = self._turns(first, stream, random, at)
        order = digest_of(first[0]) if first else 0
        for turn, (units, is_last) in enumerate(turns):
            at += len(units)
            if parts == 1 and turn % workers != number:
                continue  # it is another worker's
            digest = digest_of(units[0], _LOOKED_AT)
            if worker is not None:  # `collate` may augment, in different ways on every rank
                seed_worker(mix_seeds(seed, epoch, self.deal.rank, part, at))
            batch = units if is_last else self.units.own(units, self.deal, epoch, turn)
            yield WorkerBatch(part, parts, len(units), order, digest, is_last, batch)

    def _turns(
        self, first: list[Any], stream: Iterator[Any], random: OwnRandom, taken: int
    ) -> Iterator[tuple[list[Any], bool]]:
        """Yield global batches, and at last the rest."""
        each = self.units.each(self.deal)
        enough = each + self.units.ahead(self.deal)
        units, skipped, at_end = first, 0, False
        while not at_end:
            with random.drawing():
                more = list(islice(stream, enough - len(units)))
            at_end = len(units) + len(more) < enough
            units = units + more
            if skipped < taken:
                skipping = min(taken - skipped, len(units))
                skipped += skipping
                units = units[skipping:]
                continue
            if not at_end:
                yield units[:each], False
                units = units[each:]
        if skipped < taken:
            raise other_order(f"a stream of {skipped} rows or batches", f"more than {taken}")
        if units:
            yield units, True


@final
class ObservedWorkerInfo:
    """Torch's WorkerInfo for the dataset. It notes whether the dataset divides the stream."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self.id_, self.num_workers_ = info.id, info.num_workers
        self._info, self._dataset = info, dataset
        self._seed, self.part = info.seed, info.id
        self.shards = False

    def begin(self, seed: int, first: int) -> None:
        """Begin a pass, with the same seed on every rank.

        Worker 0 gets the part of the stream that has the first batch.
        """
        self._seed, self.part = seed, (self.id_ + first) % self.num_workers_

    def __getattr__(self, name: str) -> Any:
        self.shards = self.shards or name in _SHARDS
        if name == "id":
            return self.part
        if name == "seed":
            return mix_seeds(self._seed, self.part) if self.shards else self._seed
        return self._dataset if name == "dataset" else getattr(self._info, name)


@final
@dataclass(frozen=True)
class BeginWorker:
    """The first call in a worker: the user's `worker_init_fn`, with the user's own dataset."""

    init: Callable[[int], object] | None

    def __call__(self, worker: int) -> None:
        """Prepare the worker."""
        info: Any = torch_worker._worker_info
        seed, epoch, start = info.dataset.told()
        observed = ObservedWorkerInfo(info, info.dataset.dataset)
        observed.begin(mix_seeds(seed, epoch), next_part(start))
        begin(observed, worker, self.init)


def as_it_is(piece: Any) -> Any:
    """Return the piece unchanged, because `Dealt` has collated it."""
    return piece


@final
class Stream(Source[T]):
    """Rows or batches of one stream."""

    kind = "one stream"

    def __init__(self, dealt: Dealt, num_workers: int, seed: int, passes: Passes) -> None:
        super().__init__(dealt.deal, seed, passes)
        self._dealt, self._num_workers = dealt, num_workers
        self._order = 0  # digest of the epoch's order that a position was set in

    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """Begin a pass over the rest of the stream."""
        self._dealt.tell(self.seed, self.epoch, self.start)
        return self._give_steps(fetch(), list(self.start), self.epoch, self.order())

    def _give_steps(
        self, pieces: Iterator[Any], taken: Position, epoch: int, expected: int
    ) -> Iterator[LoaderStep[T]]:
        units, deal = self._dealt.units, self.deal
        left: list[tuple[int, Any]] = []  # the last units, each with its part's number
        is_start, turn, order = not taken, 0, expected
        for piece in (WorkerBatch(*each) for each in pieces):
            taken = taken or [0] * piece.parts
            if piece.part == 0:
                order = piece.order
            if expected and order != expected:
                raise other_order(
                    f"a stream whose first row has digest {piece.order:08x}", f"{expected:08x}"
                )
            if piece.is_last:
                left += [(piece.part, unit) for unit in piece.batch]
                continue
            taken = _behind(taken, [piece.part] * piece.num)
            yield LoaderStep(piece.batch, taken, order=order, digest=piece.digest)
            is_start, turn = False, turn + 1
        left.sort(key=lambda unit: unit[0])  # workers end in any order
        sizes = units.sizes([unit for _, unit in left], deal, is_start)
        end = sum(taken) + len(left)
        for number, size in enumerate(sizes):
            rows, left = left[:size], left[size:]
            taken = _behind(taken, [part for part, _ in rows])
            with self._drawing(epoch, end - len(left)):
                batch = units.own([row for _, row in rows], deal, epoch, turn + number)
            yield LoaderStep(batch, taken, number == len(sizes) - 1, order, end)

    def _drawing(self, epoch: int, at: int) -> AbstractContextManager[None]:
        """Collate with random numbers that differ from other ranks', as in a worker."""
        if not self._num_workers:
            return nullcontext()
        return drawing_at(mix_seeds(self.seed, epoch, self.deal.rank, -1, at))

    def num_steps(self) -> int:
        """Count the steps of the coming pass, if the dataset has a length and workers share it."""
        units, deal = self._dealt.units, self.deal
        if not isinstance(self._dealt.dataset, Sized):
            raise TypeError(
                "the length of a stream is not known: its dataset has no __len__. Count steps as "
                "you go, or give the dataset a __len__"
            )
        dataset, begun = self._dealt.dataset, sum(self.start)
        left = len(dataset) - begun
        sizes = units.last(left, deal, not self.start)
        if isinstance(dataset, Sequence) and len(sizes) > 1:  # last batches can be looked at
            tail = list(dataset[-sum(sizes[-2:]) :])
            return len(sizes) - 2 + len(units.sizes(tail, deal, not self.start))
        return len(sizes)

    def facts(self) -> str:
        """Describe the stream, in words."""
        units = self._dealt.units
        rows = "batches" if units.rows is None else f"{units.rows} rows for all ranks"
        return f"a stream{self._length()}, {rows}, {self._num_workers} workers"

    def _length(self) -> str:
        """Return the dataset's length in words; '' if it has none."""
        dataset = self._dealt.dataset
        try:
            return f" of {len(dataset)}" if isinstance(dataset, Sized) else ""
        except (TypeError, NotImplementedError):  # a wrapper of a dataset without a length
            return ""

    def order(self) -> int:
        """Return a digest of the first row, if a pass goes on in the middle of an epoch; else 0."""
        return self._order if self.start else 0

    def check(self, order: int) -> None:
        """Check that there are as many workers as parts; other faults show in the pass itself."""
        parts = len(self.start)
        if parts > 1 and parts != self._num_workers:
            raise UsageError(
                "each worker had a part of the stream, and there are as many workers no more",
                got=f"num_workers={self._num_workers}",
                expected=f"num_workers={parts}",
                do="give the loader as many workers as it had",
            )
        self._order = order


def _behind(taken: Position, parts: list[int]) -> Position:
    """Return the position after one more unit of each of these parts."""
    return [num + parts.count(part) for part, num in enumerate(taken)]
