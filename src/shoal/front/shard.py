"""`shard`: from a loader as one process would use it to a loader of this rank's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from torch.utils.data import DataLoader

from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.numbers import check_truth, how_many, is_count
from shoal.data.deal import Deal
from shoal.data.epoch_ends import NextBatchCheck
from shoal.data.order import propose_seed
from shoal.data.samplers import RankSplit, may_repeat, own_samplers, split_of, take_whole_order
from shoal.data.sharded import ShardedBatches, ShardedLoader, sampler_of, shard_loader
from shoal.data.shares import FixedShares, Shares, Speed
from shoal.front import text
from shoal.front.listings import Listing, listings, require_same_listings
from shoal.front.session_start import is_tail_host
from shoal.front.stages import Stages
from shoal.session.session import Session, current

T = TypeVar("T")
Batch = Literal["rank", "global"]
Shared = Sequence[float] | Literal["speed"] | None
_BATCH = 'give batch="global" if a loader\'s batch is that of all ranks together'


@overload
def shard(
    loader: DataLoader[T],
    *,
    batch: Batch = "rank",
    shares: Shared = None,
    shards_itself: bool | None = None,
) -> ShardedLoader[T]: ...


@overload
def shard(
    loader: Any,
    *,
    batch: Batch = "rank",
    shares: Shared = None,
    shards_itself: bool | None = None,
) -> ShardedBatches[Any]: ...


def shard(
    loader: Any,
    *,
    batch: Batch = "rank",
    shares: Shared = None,
    shards_itself: bool | None = None,
) -> Any:
    """Return a loader of this rank's own rows: none twice, none lost, equally many batches.

    A tail host has no rows of its own, and gets the loader itself.

    Args:
        loader: the loader as one process would use it, with all its options. Any DataLoader: its
            sampler, batch_sampler or IterableDataset gives the rows. Or any object that gives
            batches of tensors each time it is iterated over. Shuffling follows a seed that the
            ranks agree on, and the epoch, which advances with every pass in which a backward runs.
            A look at a batch, also on one rank alone, does not count.
        batch: "rank": a batch of the loader is one rank's batch, as with DDP. "global": it is the
            batch of all ranks together, whatever their number.
        shares: how many rows each rank takes, as one number a rank. By default all take as many.
            "speed": rows follow the measured speed of each rank's processor. Do not use it with a
            model on a GPU, because hosts only launch kernels there. Ranks are weighed exactly by
            their rows.
        shards_itself: True if an IterableDataset, or a sampler, gives each rank its own rows
            already. Then the epoch ends when the first of these streams ends. By default Shoal
            finds samplers that split by rank, and takes streams to be the same on every rank.
            False: deal out one order, even from such a sampler.

    Returns:
        A `ShardedLoader` for a DataLoader, which is a copy, or a `ShardedBatches` for other
        batches. Both have `state_dict()` and `load_state_dict()`: the position in the global order,
        also in the middle of an epoch, for any number of ranks. And both have `set_epoch(n)`.

    Raises:
        UsageError: the loader is none, has fewer rows than ranks, or a global batch smaller than
            the number of ranks. RanksDiffer: ranks have different loaders, or the same files in
            another order.

    Examples:
        >>> import shoal
        >>> from torch.utils.data import DataLoader
        >>> _ = shoal.init()
        >>> loader = shoal.shard(DataLoader(range(5), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader.state_dict()["epoch"]
        1
    """
    own_loader = dealt(loader, batch=batch, shares=shares, shards_itself=shards_itself)
    session = current()
    is_first = session.comm.size > 1 and session.passes.loaders == 1
    if is_first and batch == "rank" and shares is None and not is_tail_host(session):
        _say_batch(session.comm, getattr(loader, "batch_size", None))
    return own_loader


def dealt(
    loader: Any,
    *,
    batch: Batch = "rank",
    shares: Shared = None,
    shards_itself: bool | None = None,
) -> Any:
    """Shard a loader without the line about batches."""
    session = current()
    if is_tail_host(session):
        return loader
    comm = session.comm
    purpose = "shard: checking loaders"
    own_seed = agreed(comm, lambda: propose_seed(loader), purpose)
    seed = comm.gather_objects(own_seed, purpose)[0]
    splits = shards_itself is None and _split(loader, session)
    word = NextBatchCheck(comm) if splits or shards_itself is True else None
    by_speed = isinstance(shares, str) and shares == "speed"
    speed = Speed(comm, session.passes) if by_speed else None

    def made() -> Any:
        if batch not in ("rank", "global"):
            raise UsageError(
                "unknown kind of batch", got=repr(batch), expected='"rank" or "global"', do=_BATCH
            )
        do = "give shards_itself=True for a dataset that gives each rank its own rows"
        if shards_itself is not None:
            check_truth("shards_itself is True or False", shards_itself, do=do)
        deal = Deal(comm.rank, comm.size, batch == "global", _dealt_in(shares, speed, comm.size))
        return shard_loader(loader, deal, seed, session.passes, word)

    own_loader = agreed(comm, made, purpose)
    sampler = sampler_of(loader)
    if sampler is not None and (word is not None or may_repeat(sampler)):
        session.passes.may_repeat = True  # ranks may have the same rows, so that is no mistake
    if comm.size > 1:
        facts = f"{own_loader.source.facts()}, batch={batch!r}, shares={shares}"
        dataset = getattr(loader, "dataset", None)
        _require_same(comm, facts, [] if word is not None else listings(dataset))
    return own_loader


def _split(loader: Any, session: Session) -> bool:
    """Return whether each rank's sampler gives its own rows, and log it (a collective)."""
    comm, sampler = session.comm, sampler_of(loader)
    if comm.size == 1:
        return False
    own = None
    if take_whole_order(sampler, comm.size) is None and sampler is not None:
        own = split_of(sampler, comm.rank, comm.size)
    splits = own_samplers(comm.gather_objects(own, "shard: comparing samplers", RankSplit))
    if own is not None:
        line = (
            f"the sampler {own.name} splits its rows by rank ({own.by}): each rank takes what its "
            "own gives; shard(loader, shards_itself=False) deals one order out"
        )
    elif sampler is not None and take_whole_order(sampler, comm.size) is not None:
        line = (
            "DistributedSampler: shard takes its dataset, seed, shuffle, drop_last and set_epoch "
            "over, and deals its order out, in which no row comes twice"
        )
    else:
        return splits
    if line not in session.passes.said:
        session.passes.said.add(line)
        Stages(speaks=comm.rank == 0).say(line)
    return splits


def _say_batch(comm: Comm, rows: Any) -> None:
    """Log once, on rank 0, that a loader's batch is one rank's, as it surprises many."""
    if is_count(rows):
        Stages(speaks=comm.rank == 0).say(
            f'{text.batch([rows] * comm.size)}; shard(loader, batch="global") makes it '
            f"{how_many(rows, 'row')} of all"
        )


def _dealt_in(shares: Shared, speed: Speed | None, size: int) -> Shares:
    if speed is not None or shares is None:
        return speed or Shares()
    if isinstance(shares, str):
        raise UsageError(
            "unknown shares", got=repr(shares), expected='"speed", or one number a rank'
        )
    return FixedShares(shares, size)


def _require_same(comm: Comm, facts: str, listed: list[Listing]) -> None:
    """Raise RanksDiffer if ranks cut the same rows in different ways, or list other files."""
    told = comm.gather_objects((facts, listed), "shard: comparing loaders", Listing)
    first, *other_ranks = (each for each, _ in told)
    for rank, theirs in enumerate(other_ranks, start=1):
        if theirs != first:
            raise RanksDiffer(
                f"rank {rank} and rank 0 shard different loaders",
                got=f"rank {rank}: {theirs}",
                expected=f"as on rank 0: {first}",
                do="give the same loader and options on every rank. For rows in unlike shares, "
                "shares=[…] with a number for each rank",
                rank=rank,
            )
    require_same_listings([each for _, each in told])
