"""Gives each rank its own rows of a DataLoader: none twice, none lost, as many batches.

Ranks that count different batches wait for one another for ever, and padding with repeated rows (as
DistributedSampler does) is not the mathematics of one process. So the loader's own sampler is asked
for the global order, the same on all ranks, and each global batch of `size · batch_size` rows, as
one process would take it, is cut into one part a rank:

    global order   0 1 2 3 4 5 6 7 | 8 9 10 11 12       size 2, batch_size 4
    rank 0         0 1 2 3         | 8 9 10
    rank 1                 4 5 6 7 |        11 12

Rows per rank differ by one at most. Costs the list of the epoch's row numbers on every rank, and no
communication. What an epoch is: core/passes.py.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from shoal.core.errors import UsageError
from shoal.core.passes import Pass, Passes
from shoal.core.pieces import cut_sizes
from shoal.profiling.untraced import RANDOM_STATE

T = TypeVar("T")
_BY_HAND = (
    "shoal.world() gives rank and size: give each rank rows of its own by hand, "
    "as many batches on each"
)
_LOOKED_AT = 256  # rows of an order
_MOST_BEGUN = 64  # passes of one epoch, most of them peeks


def shard(
    loader: DataLoader[T], rank: int, size: int, seed: int, passes: Passes | None = None
) -> DataLoader[T]:
    """A copy of the loader that gives rank `rank` of `size` its own rows, in a shared order.

    Args:
        loader: batches the rows of a dataset with any sampler; `batch_size` is the number of rows
            on one rank. All its other options are kept.
        rank: which share.
        size: number of ranks; 1 gives the loader back as it is.
        seed: the same on every rank. Seed and epoch give the order; the epoch advances with every
            pass over the loader that counts (core/passes.py), and
            `loader.sampler.set_epoch(epoch)` sets it.
        passes: of the session.

    Raises:
        UsageError: not a DataLoader, one that does not say which rows make a batch, or too few rows
            for the ranks.

    >>> rows = DataLoader(list(range(10)), batch_size=2)
    >>> [batch.tolist() for batch in shard(rows, rank=1, size=2, seed=0)]
    [[2, 3], [6, 7], [9]]
    """
    if not isinstance(loader, DataLoader):
        do = "pass the torch.utils.data.DataLoader itself; for anything else " + _BY_HAND
        raise UsageError("shard takes a DataLoader", got=type(loader).__name__, do=do)
    if size == 1:
        return loader
    batches = _batches(loader)
    order = SharedOrder(batches.sampler, seed, passes or Passes())
    own_batches = RankBatches(order, batches.batch_size, batches.drop_last, rank, size)
    len(own_batches)  # too few rows are refused here, not in the first epoch

    # A copy keeps every option, also those of newer versions and of subclasses. Assigning
    # batch_sampler is refused by DataLoader because batch_size would no longer describe it;
    # RankBatches keeps to the same batch_size.
    sharded = copy.copy(loader)
    vars(sharded).update(
        sampler=order,
        batch_sampler=own_batches,
        batch_size=own_batches.batch_size,
        drop_last=own_batches.drop_last,
        _iterator=None,
    )
    return sharded


def proposed_seed(loader: DataLoader[Any]) -> int:
    """The seed to offer the other ranks: the sampler's or torch's, so a seeded script stays so."""
    generator = getattr(getattr(loader, "sampler", None), "generator", None)
    return (
        generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    )


class SharedOrder(Sampler[Any]):
    """The rows of a sampler, in an order that depends on seed and epoch alone.

    A sampler that draws from a random source of its own (not its `generator` attribute, torch,
    random or numpy) must be given the same seed on every rank by whoever made it.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, passes: Passes) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0  # of the passes that begin, until one of them counts
        self._passes, self._begun = passes, list[Pass]()  # in this epoch
        passes.loaders += 1
        self._loader = passes.loaders

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch; the passes after it go on from there."""
        self.epoch, self._begun = epoch, []
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def begin(self) -> tuple[list[Any], Pass]:
        """Begin a pass: its rows, in order."""
        if any(map(self._passes.counts, self._begun)):
            self.epoch, self._begun = self.epoch + 1, []
        with _drawing_from(self.seed + self.epoch, getattr(self.sampler, "generator", None)):
            rows = list(self.sampler)
        begun = Pass(self._loader, self.epoch, _digest(rows))
        self._begun = [*self._begun[-_MOST_BEGUN:], begun]
        return rows, begun

    def __iter__(self) -> Iterator[Any]:
        rows, begun = self.begin()
        return self.drawn(rows, begun)

    def drawn(self, items: Iterable[T], begun: Pass) -> Iterator[T]:
        """The same, which notes what is drawn."""
        return _Drawn(iter(items), begun, self._passes)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # checked by shard


class RankBatches(Sampler[list[Any]]):
    """One rank's share of each global batch."""

    def __init__(
        self, order: SharedOrder, batch_size: int, drop_last: bool, rank: int, size: int
    ) -> None:
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch."""
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        rows, begun = self.order.begin()
        ends = accumulate(
            global_batches(len(rows), self.size, self.batch_size, self.drop_last), initial=0
        )
        own = [self._mine(rows[start:end]) for start, end in pairwise(ends)]
        return self.order.drawn(own, begun)

    def __len__(self) -> int:
        return len(global_batches(len(self.order), self.size, self.batch_size, self.drop_last))

    def _mine(self, rows: list[Any]) -> list[Any]:
        sizes = cut_sizes(len(rows), self.size)
        start = sum(sizes[: self.rank])
        return rows[start : start + sizes[self.rank]]


@final
class _Drawn(Iterator[T]):
    """An iterator that notes what is drawn from it."""

    def __init__(self, items: Iterator[T], begun: Pass, passes: Passes) -> None:
        self._items, self._begun, self._passes = items, begun, passes

    def __next__(self) -> T:
        self._passes.drawn(self._begun)
        try:
            return next(self._items)
        except StopIteration:
            self._begun.complete = True
            raise


def _digest(rows: list[Any]) -> int:
    """A digest of some of an epoch's rows, in order; 0 where they are no numbers or names."""
    some = rows[:: max(1, len(rows) // _LOOKED_AT)]
    if not all(isinstance(row, int | np.integer | str) for row in some):
        return 0
    return zlib.crc32(repr([str(row) for row in some]).encode())


def global_batches(num_rows: int, size: int, batch_size: int, drop_last: bool) -> list[int]:
    """Rows that all ranks take in a step: those of one process, at least one a rank.

    Raises:
        UsageError: there are not enough rows for a single step.
    """
    full, rest = divmod(num_rows, size * batch_size)
    batches = [size * batch_size] * full
    if rest and not drop_last:
        batches.append(rest)
    if not batches or num_rows < size:
        needed = (
            f"{size * batch_size} for one whole batch a rank (drop_last)"
            if drop_last
            else f"{size}, one a rank"
        )
        raise UsageError(
            "the loader has too few rows for its ranks",
            got=f"{num_rows} rows, {size} ranks, batch_size {batch_size}",
            expected=f"at least {needed}",
            do="train on fewer ranks"
            + (", with a smaller batch_size or drop_last=False" if drop_last else ""),
        )
    # some ranks would have no row in the last step: take some from the step before
    if batches[-1] < size:
        short = batches.pop()
        batches[-1] += short
        if batch_size > 1:
            batches[-1:] = [batches[-1] - size, size]
    return batches


def _batches(loader: DataLoader[Any]) -> BatchSampler:
    """How the loader makes batches out of single rows, or why that cannot be cut."""
    if isinstance(loader.dataset, IterableDataset):
        do = f"use a dataset with __len__ and __getitem__; or {_BY_HAND}, inside the dataset"
        raise UsageError(
            "an IterableDataset has no rows that could be cut",
            got=type(loader.dataset).__name__,
            do=do,
        )
    batches = loader.batch_sampler
    if batches is None:
        do = f"give the DataLoader a batch_size; or {_BY_HAND}"
        raise UsageError(
            "a DataLoader with batch_size=None does not say which rows make a batch", do=do
        )
    if type(batches) is not BatchSampler:
        if isinstance(batches, RankBatches):
            raise UsageError("the loader is sharded already", do="call shoal.shard once")
        do = f"pass batch_size and a sampler of single rows in its place; or {_BY_HAND}"
        raise UsageError(
            "a batch_sampler of one's own cannot be cut", got=type(batches).__name__, do=do
        )
    if isinstance(batches.sampler, DistributedSampler):
        do = (
            "drop the DistributedSampler: shoal.shard takes its place, and shuffle=True "
            "shuffles alike on every rank"
        )
        raise UsageError("the loader's rows are cut already, by a DistributedSampler", do=do)
    if not hasattr(batches.sampler, "__len__"):
        do = "give the sampler a __len__: the number of rows in an epoch"
        raise UsageError(
            "the loader's sampler has no length", got=type(batches.sampler).__name__, do=do
        )
    return batches


@contextmanager
def _drawing_from(seed: int, generator: Any) -> Iterator[None]:
    """Start all that a sampler may draw from at `seed`, and put it back afterwards."""
    generators = [
        torch.default_generator,
        *([generator] if isinstance(generator, torch.Generator) else []),
    ]
    with RANDOM_STATE:
        states = [source.get_state() for source in generators]
        python_state, numpy_state = random.getstate(), np.random.get_state()
        try:
            for source in generators:
                source.manual_seed(seed % 2**63)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            for source, state in zip(generators, states, strict=True):
                source.set_state(state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
