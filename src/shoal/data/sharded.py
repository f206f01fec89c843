"""A loader of one rank's own batches: what a loop iterates over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from shoal.core.errors import UsageError
from shoal.core.passes import Passes
from shoal.data.deal import Deal
from shoal.data.rows import GlobalOrder, Items, Known, Lists, OwnItems, OwnRows, SamplerRows
from shoal.data.shares import Speed
from shoal.data.source import Source
from shoal.data.stream import BeginWorker, Dealt, Stream, Units, as_it_is
from shoal.data.streams import NextBatchCheck, Streams

T = TypeVar("T")


class Positioned(Generic[T]):
    """What shoal.shard gives: each rank's own batches, and the position that all ranks are at."""

    source: Source[T]

    def state_dict(self) -> dict[str, Any]:
        """The position in the global order, as plain data.

        It is the same on every rank, but for streams that shard themselves. It is behind the last
        batch that the loop took in the epoch that it trains on. Saved by any number of ranks, any
        number of ranks goes on from it.

        Raises:
            UsageError: a dataset that shards itself cannot say where it is.
        """
        return self.source.state()

    @property
    def epoch(self) -> int:
        """The epoch of the row that comes next, counted from 0: where a loop goes on.

        Raises:
            UsageError: as `state_dict`.
        """
        return int(self.state_dict()["epoch"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from a position, on every rank from the same one.

        Raises:
            UsageError: it is that of another kind of loader, another dataset or another order.
        """
        self.source.load(state)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch, from its start."""
        self.source.set_epoch(epoch)


class ShardedLoader(Positioned[T], DataLoader[T]):
    """A DataLoader of this rank's own rows: what `shard` makes of a DataLoader.

    It has all options of the loader that it was made of.

    Examples:
        >>> import shoal
        >>> from torch.utils.data import DataLoader
        >>> _ = shoal.init()
        >>> loader = shoal.shard(DataLoader(range(4), batch_size=2))
        >>> isinstance(loader, shoal.ShardedLoader), len(loader)
        (True, 2)
    """

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch names its own class
        return self.source.passed(super().__iter__)

    def __len__(self) -> int:
        return self.source.num_steps()


@final
class ShardedBatches(Positioned[T]):
    """This rank's own of the batches that an iterable gives: what `shard` makes of one.

    It has `state_dict`, `load_state_dict`, `set_epoch` and `epoch`, as a `ShardedLoader`.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> batches = shoal.shard([torch.ones(2), torch.zeros(2)])
        >>> [batch.tolist() for batch in batches]
        [[1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, batches: Iterable[Any], source: Source[T]) -> None:
        self.batches, self.source = batches, source

    def __iter__(self) -> Iterator[T]:
        return self.source.passed(lambda: iter(self.batches))

    def __len__(self) -> int:
        return self.source.num_steps()


def sharded(
    loader: Any,
    deal: Deal,
    seed: int,
    passes: Passes | None = None,
    next_batch: NextBatchCheck | None = None,
) -> Any:
    """A loader that gives a rank its own rows.

    Args:
        loader: a DataLoader, or an iterable of batches; all its options are kept.
        deal: how global batches are dealt.
        seed: the same on every rank. Seed and epoch give the order.
        passes: of the session.
        next_batch: among ranks whose datasets shard themselves; None where they do not.

    Raises:
        UsageError: a loader that cannot be dealt, or too few rows for the ranks.

    >>> rows = DataLoader(list(range(10)), batch_size=2)
    >>> [batch.tolist() for batch in sharded(rows, Deal(rank=1, size=2), seed=0)]
    [[2, 3], [6, 7], [9]]
    """
    passes = passes or Passes()
    if isinstance(loader, Positioned):
        raise UsageError("the loader is sharded already", do="call shoal.shard once")
    if not isinstance(loader, DataLoader):
        return _of_batches(loader, deal, seed, passes, next_batch)
    if next_batch is not None:
        return _of_streams(loader, deal, seed, passes, next_batch)
    if isinstance(loader.dataset, IterableDataset):
        return _of_stream(loader, deal, seed, passes)
    return _of_rows(loader, deal, seed, passes)


def _of_rows(loader: DataLoader[T], deal: Deal, seed: int, passes: Passes) -> ShardedLoader[T]:
    """Of a dataset with `__getitem__`."""
    batches = loader.batch_sampler
    rows = getattr(batches, "sampler", loader.sampler)
    if isinstance(rows, DistributedSampler):
        raise UsageError(
            "the loader's rows are cut already, by a DistributedSampler",
            do="drop the DistributedSampler: shoal.shard takes its place, and shuffle=True "
            "shuffles alike on every rank",
        )
    source: Known[T]
    own: dict[str, Any]
    if batches is None:
        deal.check_batches()
        items = Items[T](rows, deal, seed, passes)
        source, own = items, {"sampler": OwnItems(items)}
    elif type(batches) is BatchSampler:
        size, drop_last = batches.batch_size, batches.drop_last
        source = SamplerRows(rows, size, drop_last, deal, seed, passes)
        own = {"sampler": GlobalOrder(source), "batch_sampler": OwnRows(source, size, drop_last)}
        own |= {"batch_size": size, "drop_last": drop_last}
    else:
        source = Lists(batches, deal, seed, passes)
        own = {"batch_sampler": OwnRows(source, loader.batch_size, drop_last=False)}
    source.num_steps()  # too few rows are refused here, not in the first epoch
    return _copy(loader, source, **own)


def _of_stream(loader: DataLoader[T], deal: Deal, seed: int, passes: Passes) -> ShardedLoader[T]:
    """Of an IterableDataset."""
    if loader.num_workers and isinstance(deal.shares, Speed):
        raise UsageError(
            "workers that read a stream cut it themselves, and know of no speeds",
            got=f"num_workers={loader.num_workers}",
            do="num_workers=0, or give the shares as numbers",
        )
    if loader.batch_size is None:
        deal.check_batches()
    rows = None if loader.batch_size is None else deal.rows(loader.batch_size)
    collate: Callable[[Any], Any] = loader.collate_fn
    units = Units(rows, loader.drop_last, collate)
    dealt = Dealt(loader.dataset, deal, units)  # type: ignore[arg-type]  # it can be iterated over
    return _copy(
        loader,
        Stream[T](dealt, loader.num_workers, seed, passes),
        dataset=dealt,
        batch_sampler=None,
        collate_fn=as_it_is,
        worker_init_fn=BeginWorker(loader.worker_init_fn) if loader.num_workers else None,
    )


def _of_streams(
    loader: DataLoader[T], deal: Deal, seed: int, passes: Passes, next_batch: NextBatchCheck
) -> ShardedLoader[T]:
    """Of datasets that give each rank its own rows."""
    if not isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "shards_itself is for an IterableDataset that gives each rank its own rows",
            got=type(loader.dataset).__name__,
            do="leave shards_itself out",
        )
    if isinstance(deal.shares, Speed):
        raise UsageError(
            "ranks that have streams of their own take rows at their own pace",
            got='shares="speed" and shards_itself',
            do="give the shares as numbers, or leave shards_itself out",
        )
    own: dict[str, Any] = {}
    if loader.batch_size is not None:
        total = deal.rows(loader.batch_size)
        start, stop = deal.span(total, 0, 0)
        own["batch_size"] = stop - start
        own["batch_sampler"] = BatchSampler(loader.sampler, stop - start, loader.drop_last)
    return _copy(loader, Streams[T](loader, deal, seed, passes, next_batch), **own)


def _of_batches(
    loader: Any, deal: Deal, seed: int, passes: Passes, next_batch: NextBatchCheck | None
) -> ShardedBatches[Any]:
    """Of an iterable of batches."""
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Mapping):
        raise UsageError(
            "shard takes a DataLoader, or anything that gives batches again and again",
            got=type(loader).__name__,
            do="pass the torch.utils.data.DataLoader itself, or an iterable of batches; of several "
            "loaders shard each",
        )
    if isinstance(loader, Iterator):
        raise UsageError(
            "an iterator gives its batches once only, so there would be no second epoch",
            got=type(loader).__name__,
            do="pass what makes it: an object whose __iter__ begins a pass",
        )
    if next_batch is not None:
        return ShardedBatches(loader, Streams(loader, deal, seed, passes, next_batch))
    deal.check_batches()
    dealt = Dealt(loader, deal, Units(None, drop_last=False, collate=as_it_is))
    return ShardedBatches(dealt, Stream(dealt, 0, seed, passes))


def _copy(loader: DataLoader[T], source: Source[T], **own: Any) -> ShardedLoader[T]:
    """A copy keeps every option, also those of newer versions and of subclasses.

    Assigning batch_sampler is refused by DataLoader, as batch_size would no longer describe it;
    what takes its place here keeps to the same batch_size.
    """
    copied = copy.copy(loader)
    if hasattr(copied, "in_order"):
        own["in_order"] = True  # else ranks' batches would not belong together
    vars(copied).update(source=source, _iterator=None, **own)
    copied.__class__ = _class_of(type(loader))  # type: ignore[arg-type]  # a type has a hash
    return copied  # type: ignore[return-value]  # it is one now


@cache
def _class_of(kind: type[DataLoader[Any]]) -> type[ShardedLoader[Any]]:
    """ShardedLoader as a subclass of a user's own DataLoader."""
    if kind is DataLoader:
        return ShardedLoader
    return type(f"Sharded{kind.__name__}", (ShardedLoader, kind), {})
