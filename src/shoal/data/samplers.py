"""Samplers that are made for several ranks: torch's DistributedSampler, and others.

    a DistributedSampler       is replaced: its order is dealt out, without repeated rows
    one that splits by itself  gives each rank its own rows, which are taken as they are
    all others                 give one order on every rank, which is dealt out

A sampler splits by itself if it, or its code, has this rank's number and the number of ranks. If
such an order was dealt out again, rows would be lost silently.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DistributedSampler, Sampler

from shoal.core.errors import UsageError
from shoal.data.order import set_epoch
from shoal.data.source import Source

_DEPTH = 4  # deepest nesting of samplers in samplers
_RANK = {
    "rank", "process_index", "process_id", "shard_id", "shard_index", "data_parallel_rank",
    "dp_rank", "rank_id", "get_rank", "local_rank", "worker_rank", "current_rank",
}  # fmt: skip
_RANKS = {
    "num_replicas", "world_size", "num_processes", "num_shards", "num_ranks", "n_ranks",
    "data_parallel_size", "dp_size", "rank_size", "get_world_size", "size", "nranks",
}  # fmt: skip
_ASKS = ({"get_rank", "get_world_size"}, {"world", "rank", "size"})
_SETTINGS = ("RANK", "WORLD_SIZE")  # environment variables


@final
class WholeOrder(Sampler[int]):
    """The order of all ranks, from which a DistributedSampler cuts its own rows.

    Args:
        given: torch's own sampler. This order follows its dataset, seed, shuffle and drop_last.
        size: number of ranks.
    """

    def __init__(self, given: DistributedSampler[Any], size: int) -> None:
        self.given, self._size, self.epoch = given, size, given.epoch

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch from now on."""
        self.epoch = epoch
        set_epoch(self.given, epoch)

    def __iter__(self) -> Iterator[int]:
        if not self.given.shuffle:
            return iter(range(len(self)))
        generator = torch.Generator().manual_seed(self.given.seed + self.epoch)
        order = torch.randperm(self._num_rows(), generator=generator, device="cpu").tolist()
        return iter(order[: len(self)])

    def __len__(self) -> int:
        num = self._num_rows()
        return num - num % self._size if self.given.drop_last else num

    def _num_rows(self) -> int:
        dataset: Any = self.given.dataset
        return len(dataset)


def take_whole_order(sampler: Any, size: int) -> WholeOrder | None:
    """Return the whole order of a sampler that cuts as torch's DistributedSampler; else None."""
    own = isinstance(sampler, DistributedSampler) and (
        type(sampler).__iter__ is DistributedSampler.__iter__
    )
    return WholeOrder(sampler, size) if own else None


def follow(sampler: Any, source: Source[Any]) -> None:
    """Make `set_epoch` of a sampler, and of samplers in it, also set the epoch of a source."""
    for one in _within(sampler):
        inner = getattr(one, "set_epoch", None)
        if inner is not None:
            with suppress(AttributeError):  # it may have no attributes of its own
                one.set_epoch = _Following(one.set_epoch, source)


@final
class _Following:
    """A sampler's `set_epoch`, which also tells a source."""

    def __init__(self, before: Callable[[int], object], source: Source[Any]) -> None:
        self.own = getattr(before, "own", before)  # its own function, without sources that follow
        self._before, self._source = before, source

    def __call__(self, epoch: int) -> None:
        self._source.follow_epoch(epoch)
        self._before(epoch)


def may_repeat(sampler: Any) -> bool:
    """Return whether a sampler may give a row twice in a pass, such as one with replacement.

    A sampler that is not torch's own may do so.
    """
    return any(
        bool(getattr(one, "replacement", False))
        or not type(one).__module__.startswith("torch.utils.data")
        for one in _within(sampler)
    )


@dataclass(frozen=True)
class RankSplit:
    """A sampler that seems to split its rows by rank.

    Args:
        name: its class's name.
        by: the evidence, in words.
        fits: whether it has this rank's number and the number of ranks here.
    """

    name: str
    by: str
    fits: bool


def split_of(sampler: Any, rank: int, size: int) -> RankSplit | None:
    """Find out whether a sampler splits by rank itself; return None if not.

    Args:
        sampler: a sampler or batch_sampler.
        rank: this rank.
        size: number of ranks.
    """
    for one in _within(sampler):
        if type(one).__module__.startswith("torch.") and not isinstance(one, DistributedSampler):
            continue
        found = _of_attributes(one, rank, size) or _of_code(one, rank, size)
        if found is not None:
            return found
    return None


def own_samplers(everyone: list[RankSplit | None]) -> bool:
    """Return whether every rank's sampler gives it its own rows.

    Raises:
        UsageError: the samplers split by other numbers than the ranks here have.
    """
    found = [split for split in everyone if split is not None]
    if not found:
        return False
    if len(found) == len(everyone) and all(split.fits for split in found):
        return True
    odd = next((rank for rank, split in enumerate(everyone) if not (split and split.fits)), 0)
    split = everyone[odd] or found[0]
    raise UsageError(
        f"the sampler {split.name} seems to split its rows by rank, and not by the ranks here",
        got=f"rank {odd} of {len(everyone)}: {split.by}",
        do="give it this rank and the number of ranks (shoal.world()), or a sampler that gives "
        "one order on every rank. shard(loader, shards_itself=True) takes each rank's rows as they "
        "are, shards_itself=False deals them out",
    )


def _within(sampler: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield a sampler, and the samplers in it."""
    yield sampler
    for value in vars(sampler).values() if depth and hasattr(sampler, "__dict__") else ():
        if isinstance(value, Sampler) or hasattr(value, "set_epoch"):
            yield from _within(value, depth - 1)


def _of_attributes(sampler: Any, rank: int, size: int) -> RankSplit | None:
    numbers = {
        name: value
        for name, value in getattr(sampler, "__dict__", {}).items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    ranks = [name for name in numbers if name.strip("_") in _RANK]
    sizes = [name for name in numbers if name.strip("_") in _RANKS - {"size"}]
    if not ranks or not sizes or numbers[sizes[0]] == 1:
        return None
    of, num = ranks[0], sizes[0]
    fits = (numbers[of], numbers[num]) == (rank, size)
    return RankSplit(type(sampler).__name__, f"{of}={numbers[of]}, {num}={numbers[num]}", fits)


def _of_code(sampler: Any, rank: int, size: int) -> RankSplit | None:
    """Find a split in the code of its methods, which may read the numbers from outside."""
    for kind in type(sampler).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType) and method.__name__ != "__init__":
                names, texts = _words(method.__code__)
                known = {name: _value(method, name) for name in names}
                of = [name for name in _RANK & names if _is(known[name], rank)]
                num = [name for name in _RANKS & names if _is(known[name], size)]
                asks = any(each <= names for each in _ASKS) or set(_SETTINGS) <= texts
                world = [n for n, v in known.items() if _is_world(v, rank, size)]
                if (of and num) or asks or (world and _RANK & names):
                    by = " and ".join([*of, *num][:2] or world or ["its rank"])
                    return RankSplit(type(sampler).__name__, f"{method.__name__} reads {by}", True)
    return None


def _words(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names and the texts in code, and in functions inside it."""
    names, texts = {*code.co_names, *code.co_freevars}, set[str]()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _words(constant)
            names, texts = names | inner[0], texts | inner[1]
        elif isinstance(constant, str):
            texts.add(constant)
    return names, texts


def _value(method: types.FunctionType, name: str) -> Any:
    """Return the value that a name has around a method; None if it has none."""
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=False))
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:  # not bound yet
            return None
    return method.__globals__.get(name)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == number


def _is_world(value: Any, rank: int, size: int) -> bool:
    """Return whether an object, such as an accelerator, has both numbers."""
    if isinstance(value, type | types.ModuleType):
        return False
    return any(_is(getattr(value, name, None), rank) for name in _RANK) and any(
        _is(getattr(value, name, None), size) for name in _RANKS
    )
