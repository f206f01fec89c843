"""A loader of one rank's own batches, for a loop to iterate over."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, final

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from shoal.core.errors import UsageError
from shoal.core.numbers import how_many
from shoal.core.passes import Passes
from shoal.data.deal import Deal
from shoal.data.epoch_ends import NextBatchCheck, OwnEnds
from shoal.data.own_stream import BeginStream, OwnStream
from shoal.data.rows import GlobalOrder, Items, Known, Lists, OwnItems, OwnRows, SamplerRows
from shoal.data.samplers import follow, take_whole_order
from shoal.data.shares import Speed
from shoal.data.source import Source
from shoal.data.stream import BeginWorker, Dealt, Stream, Units, as_it_is
from shoal.data.streams import Streams
from shoal.data.workers import seeded

T = TypeVar("T")
_ONE_STREAM = "one stream that all of them read: shard(loader) without shards_itself"
_ONE_ORDER = "a sampler that gives one order on every rank, which shard deals out"


class Positioned(Generic[T]):
    """A sharded loader: each rank's own batches, and the position that all ranks share."""

    source: Source[T]
    # Accelerate does not deal out a loader with this mark, and so not a second time.
    _is_accelerate_prepared: ClassVar[bool] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the global order, as plain data.

        It is the same on every rank, except for streams that shard themselves. It stands after the
        last batch that the loop took in the epoch that it trains on. Any number of ranks may save
        it, and any number may go on from it.

        Raises:
            UsageError: a dataset that shards itself cannot tell its position.
        """
        return self.source.state()

    @property
    def epoch(self) -> int:
        """The epoch of the next row, counted from 0: a loop goes on there.

        Raises:
            UsageError: as in `state_dict`.
        """
        return int(self.state_dict()["epoch"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on from a position, which must be the same on every rank.

        Raises:
            UsageError: it belongs to another kind of loader, another dataset or another order.
        """
        self.source.load(_of_rank(state, self.source))

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass begin this epoch, from its start."""
        self.source.set_epoch(epoch)


class ShardedLoader(Positioned[T], DataLoader[T]):
    """A DataLoader of this rank's own rows, which `shard` makes of a DataLoader.

    It has all options of that loader.

    Examples:
        >>> import shoal
        >>> from torch.utils.data import DataLoader
        >>> _ = shoal.init()
        >>> loader = shoal.shard(DataLoader(range(4), batch_size=2))
        >>> isinstance(loader, shoal.ShardedLoader), len(loader)
        (True, 2)
    """

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch names its own class
        return self.source.passed(self._fetch)

    def _fetch(self) -> Iterator[T]:
        """Begin a pass. Workers are kept if this pass and the last one begin an epoch."""
        goes_on = bool(self.source.start)
        if goes_on or vars(self).get("_went_on"):
            self._iterator = None
        vars(self)["_went_on"] = goes_on
        return super().__iter__()

    def _get_iterator(self) -> Any:
        source, seen = self.source, self
        if self.num_workers and isinstance(source, Known):
            seen = seeded(self, source)
        return super(ShardedLoader, seen)._get_iterator()

    def __len__(self) -> int:
        return self.source.num_steps()


def _of_rank(state: Mapping[str, Any], source: Source[Any]) -> Mapping[str, Any]:
    """Pick this rank's own state if a checkpoint has one for each rank."""
    states: Any = state.get("ranks") if isinstance(state, Mapping) else None
    if not isinstance(states, list) or not states or not isinstance(states[0], Mapping):
        return state
    own, first = source.own, states[0]
    if own is not None and own.size == len(states):
        own_state: Mapping[str, Any] = states[own.rank]  # checked when it is loaded
        return own_state
    if own is not None and own.rank == 0:
        warnings.warn(
            f"each of {how_many(len(states), 'rank')} had rows of its own, and now there are "
            f"{own.size}: every rank begins epoch {first.get('epoch')} from its start, so some of "
            "its rows come again. Start as many ranks to go on exactly",
            stacklevel=4,
        )
    return {**first, "position": [], "order": 0}


@final
class ShardedBatches(Positioned[T]):
    """This rank's own batches of an iterable, which `shard` makes of an iterable of batches.

    It has `state_dict`, `load_state_dict`, `set_epoch` and `epoch`, as a `ShardedLoader` has.

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


def shard_loader(
    loader: Any,
    deal: Deal,
    seed: int,
    passes: Passes | None = None,
    next_batch: NextBatchCheck | None = None,
) -> Any:
    """Return a loader that gives a rank its own rows.

    Args:
        loader: a DataLoader, or an iterable of batches; all its options are kept.
        deal: the division of global batches among ranks.
        seed: the same on every rank. Seed and epoch determine the order.
        passes: the session's passes.
        next_batch: the check among ranks, if each has a dataset or sampler for its own rows; None
            if all have the same.

    Raises:
        UsageError: the loader cannot be dealt out, or has too few rows for the ranks.

    >>> rows = DataLoader(list(range(10)), batch_size=2)
    >>> [batch.tolist() for batch in shard_loader(rows, Deal(rank=1, size=2), seed=0)]
    [[2, 3], [6, 7], [9]]
    """
    passes = passes or Passes()
    if isinstance(loader, Positioned):
        raise UsageError("the loader is sharded already", do="call shoal.shard once")
    if not isinstance(loader, DataLoader):
        return _of_batches(loader, deal, seed, passes, next_batch)
    is_stream = isinstance(loader.dataset, IterableDataset)
    if next_batch is not None:
        ends = OwnEnds(deal.rank, deal.size, next_batch, _ONE_STREAM if is_stream else _ONE_ORDER)
        if is_stream:
            return _of_streams(loader, deal, seed, passes, ends)
        return _of_rows(loader, _alone(loader, deal), seed, passes, ends)
    if is_stream:
        return _of_stream(loader, deal, seed, passes)
    return _of_rows(loader, deal, seed, passes)


def sampler_of(loader: Any) -> Any:
    """Return the object with a loader's order: its own batch_sampler, a sampler, or None."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return batches
    return getattr(batches, "sampler", loader.sampler)


def _of_rows(
    loader: DataLoader[T], deal: Deal, seed: int, passes: Passes, ends: OwnEnds | None = None
) -> ShardedLoader[T]:
    """Shard a dataset with `__getitem__`. With `ends`, each rank's sampler gives its own rows."""
    batches, given = loader.batch_sampler, sampler_of(loader)
    whole = take_whole_order(given, deal.size) if ends is None else None
    rows = given if whole is None else whole
    source: Known[T]
    own: dict[str, Any]
    if batches is None:
        deal.check_batches()
        items = Items[T](rows, deal, seed, passes, ends)
        source, own = items, {"sampler": OwnItems(items)}
    elif type(batches) is BatchSampler:
        size, drop_last = batches.batch_size, batches.drop_last
        source = SamplerRows(rows, size, drop_last, deal, seed, passes, ends)
        own = {"sampler": GlobalOrder(source), "batch_sampler": OwnRows(source, size, drop_last)}
        own |= {"batch_size": size, "drop_last": drop_last}
    else:
        source = Lists(batches, deal, seed, passes, ends)
        own = {"batch_sampler": OwnRows(source, loader.batch_size, drop_last=False)}
    source.look()  # too few rows are refused here, not in the first epoch
    follow(given, source)
    if whole is not None:
        source.set_epoch(whole.epoch)
    return _copy(loader, source, **own)


def _alone(loader: DataLoader[Any], deal: Deal) -> Deal:
    """Return the deal for one rank, because this rank's sampler gives rows for no other.

    Raises:
        UsageError: a sampler of torch gives all rows, or a batch would have to be cut.
    """
    given = sampler_of(loader)
    if type(given).__module__.startswith("torch.") and not isinstance(given, DistributedSampler):
        raise UsageError(
            "shards_itself is for an IterableDataset, or a sampler, that gives each rank its own "
            "rows",
            got=f"{type(loader.dataset).__name__}, with torch's {type(given).__name__}",
            do="leave shards_itself out",
        )
    if deal.together or not deal.shares.even:
        raise UsageError(
            "a sampler that gives each rank its own rows leaves nothing to cut",
            got=f"{type(given).__name__}, with "
            + ('batch="global"' if deal.together else "shares"),
            do="give the loader the batch_size of one rank, or a sampler that gives one order on "
            "every rank",
        )
    return Deal(0, 1)


def _of_stream(loader: DataLoader[T], deal: Deal, seed: int, passes: Passes) -> ShardedLoader[T]:
    """Shard an IterableDataset that gives all ranks the same stream."""
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
    loader: DataLoader[T], deal: Deal, seed: int, passes: Passes, ends: OwnEnds
) -> ShardedLoader[T]:
    """Shard datasets that give each rank its own rows."""
    if isinstance(deal.shares, Speed):
        raise UsageError(
            "ranks that have streams of their own take rows at their own pace",
            got='shares="speed" and shards_itself',
            do="give the shares as numbers, or leave shards_itself out",
        )
    rows = loader.batch_size
    if rows is not None:
        start, stop = deal.span(deal.rows(rows), 0, 0)
        rows = stop - start
    collate: Callable[[Any], Any] = loader.collate_fn
    stream = OwnStream(loader.dataset, rows, loader.drop_last, collate, deal.rank)
    return _copy(
        loader,
        Streams[T](stream, loader.num_workers, deal, seed, passes, ends),
        dataset=stream,
        batch_size=rows,
        batch_sampler=None,
        collate_fn=as_it_is,
        worker_init_fn=BeginStream(loader.worker_init_fn) if loader.num_workers else None,
    )


def _of_batches(
    loader: Any, deal: Deal, seed: int, passes: Passes, next_batch: NextBatchCheck | None
) -> ShardedBatches[Any]:
    """Shard an iterable of batches."""
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
        stream = OwnStream(loader, None, False, as_it_is, deal.rank, draws=False)
        ends = OwnEnds(deal.rank, deal.size, next_batch, _ONE_STREAM)
        return ShardedBatches(stream, Streams(stream, 0, deal, seed, passes, ends))
    deal.check_batches()
    units = Units(None, drop_last=False, collate=as_it_is)
    if isinstance(loader, Sequence) and loader and not isinstance(deal.shares, Speed):
        # too few rows at its end are refused here
        num_last = sum(units.last(len(loader), deal, is_start=True)[-2:])
        tail = list(loader[-num_last:])
        units.own(tail[-units.sizes(tail, deal, is_start=True)[-1] :], deal, epoch=0, turn=0)
    dealt = Dealt(loader, deal, units)
    return ShardedBatches(dealt, Stream(dealt, 0, seed, passes))


def _copy(loader: DataLoader[T], source: Source[T], **own: Any) -> ShardedLoader[T]:
    """Copy a loader with every option, including options of newer versions and of subclasses.

    DataLoader does not allow assigning batch_sampler, because batch_size would no longer describe
    it. The new batch_sampler here keeps to the same batch_size.
    """
    copied = copy.copy(loader)
    if hasattr(copied, "in_order"):
        own["in_order"] = True  # ranks' batches belong together in order only
    vars(copied).update(source=source, _iterator=None, **own)
    copied.__class__ = _class_of(type(loader))  # type: ignore[arg-type]  # a type has a hash
    return copied  # type: ignore[return-value]  # its class is this one now


@cache
def _class_of(kind: type[DataLoader[Any]]) -> type[ShardedLoader[Any]]:
    """Make ShardedLoader a subclass of a user's own DataLoader."""
    if kind is DataLoader:
        return ShardedLoader
    return type(f"Sharded{kind.__name__}", (ShardedLoader, kind), {})
