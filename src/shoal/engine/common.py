"""What ranks must have in common as they train: compared in every backward, by one small word.

    settings   of the optimizers' groups: learning rates and all other numbers and words
    pass       over which loader, in which epoch, in which order of its rows
    weights    how often somebody other than an optimizer's step has changed them

    1  mark      a rank makes a word of 16 bits of all this, which goes with what is sent anyway:
                 with one bucket or layer (strategies/marks.py), or with counts of rows (weights.py)
    2  compare   only where words differ, as every rank sees: ranks tell what they have. What
                 matters is an error that names rank and thing. Weights that every rank updates, and
                 that were changed and put back, are none: their bits tell

A mark costs some 20 µs of one process, and grows with parameters and groups: their versions and
identities are looked at, not memory. Guarded by tests/equivalence/test_in_common.py.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.plain import packed, unpacked
from shoal.contracts.transfer import Mark
from shoal.core.errors import RanksDiffer
from shoal.core.passes import Passes
from shoal.profiling.identity import content
from shoal.tensors.cut import is_cut
from shoal.tensors.guarded import GuardedParameter

_ELEMENTS = 4  # of a parameter
_NEARLY = 1e-5  # of the largest element: other processors round otherwise
_NOTHING = object()
_OPEN = (list, dict, Tensor)  # may be changed in place
_LOAD = "load weights, and change them, on every rank alike"


@final
class Common:
    """One model's, on one rank.

    Args:
        model: as it is parallelised.
        optimizers: that train it.
        passes: over the loaders of the session.
        changed: the parameters with owners that somebody else has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        passes: Passes,
        changed: Callable[[], list[Tensor]] = list,
    ) -> None:
        self._settings = [_OptimizerSettings(optimizer) for optimizer in optimizers]
        self._passes, self._changed = passes, changed
        self._whole = {
            name: p
            for name, p in model.named_parameters()
            if not is_cut(p) and not p.is_inference()
        }
        self._plain = {n: p for n, p in self._whole.items() if not isinstance(p, GuardedParameter)}
        self._before = self._versions()  # that all ranks have agreed to
        self._known: _CommonMark | None = None
        self.where = ""  # of the last mark, for messages

    def mark(self, where: str) -> Mark:
        """What this rank has now."""
        self.where = where
        settings = tuple([groups.digests() for groups in self._settings])
        current = self._passes.current()
        of_pass = (current.loader, current.epoch, current.order) if current else (0, 0, 0)
        of_owners = self._changed()
        has = settings, of_pass, self._versions() - self._before, len(of_owners)
        known = self._known
        if known is None or has != known.has or of_owners:
            known = self._known = _CommonMark.of(self, has, tuple(map(self._name, of_owners)))
        return known

    def _versions(self) -> int:
        return sum([p._version for p in self._plain.values()])

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, p in self._whole.items() if p is parameter), "(of another)")

    def agree(self, changes: int) -> None:
        """So many changes were none in the end."""
        self._before += changes

    def told(self, mark: _CommonMark) -> dict[str, Any]:
        """All that the ranks compare, as plain data."""
        return {
            "settings": [text for groups in self._settings for text in groups.texts()],
            "pass": list(mark.has[1]),
            "changes": mark.has[2],
            "of owners": list(mark.of_owners),
            "weights": {name: _looked_at(p) for name, p in self._plain.items()},
        }


@final
@dataclass(frozen=True)
class _CommonMark(Mark):
    """The word of one rank in one round, and all that it stands for."""

    common: Common
    has: tuple[tuple[tuple[int, ...], ...], tuple[int, int, int], int, int]
    of_owners: tuple[str, ...]  # names of those that were changed here
    word: int

    @classmethod
    def of(cls, common: Common, has: Any, of_owners: tuple[str, ...]) -> _CommonMark:
        return cls(common, has, of_owners, zlib.crc32(repr(has).encode()) & 0xFFFF)

    def compare(self, comm: Comm) -> None:
        told = exchanged(comm, self.common.told(self))
        odd = _difference(told, alike=len(set(comm.topology.processors)) < 2)
        if odd is None:
            self.common.agree(self.has[2])
            return
        raise RanksDiffer(
            f"rank {odd.rank} and rank {odd.other} have come to differ: {odd.what}",
            where=self.common.where,
            got=f"rank {odd.rank}: {odd.got}",
            expected=f"as on rank {odd.other}: {odd.expected}",
            do=odd.do,
            rank=odd.rank,
        )


@final
class _OptimizerSettings:
    """The settings of one optimizer's groups."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kind = type(optimizer).__name__
        self._seen: list[_GroupDigest] = []

    def digests(self) -> tuple[int, ...]:
        """A digest of each as it is now."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._seen):
            self._seen = [_GroupDigest() for _ in groups]
        return tuple([seen.digest(group) for seen, group in zip(self._seen, groups, strict=True)])

    def texts(self) -> list[tuple[str, str]]:
        """Each setting as messages call it, and its value."""
        return [
            (f"{self._kind}.param_groups[{number}][{name!r}]", repr(value))
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in _plain_settings(group).items()
        ]


@final
class _GroupDigest:
    """A group's settings as they were: what is the same object still is not read again."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._texts: list[str] = []
        self._digest = 0

    def digest(self, group: Mapping[str, Any]) -> int:
        """A digest of the settings as they are now."""
        values, texts = self._values, self._texts
        if len(values) != len(group):
            values[:], texts[:] = [_NOTHING] * len(group), [""] * len(group)
        changed = False
        for index, (name, value) in enumerate(group.items()):
            if value is values[index] and not isinstance(value, _OPEN):
                continue
            values[index] = value
            text = "" if name == "params" else repr(_plain_settings({name: value}))
            if text != texts[index]:
                texts[index], changed = text, True
        if changed:
            self._digest = zlib.crc32("".join(texts).encode())
        return self._digest


def _plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's numbers and words; of a tensor with one element on the host, that."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, Tensor):
            if value.numel() == 1 and value.device.type == "cpu":
                found[name] = value.item()
        elif name != "params" and _is_plain(value):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _looked_at(parameter: nn.Parameter) -> tuple[int, list[float]]:
    """A digest of all its bits, and some elements."""
    value = parameter.detach()
    ends = value[tuple(slice(None, None, max(1, size - 1)) for size in value.shape)]
    some = ends.reshape(-1)[:_ELEMENTS].abs().double().tolist()
    return int.from_bytes(hashlib.blake2b(content(value), digest_size=4).digest(), "big"), some


@dataclass(frozen=True)
class _Difference:
    """What differs between two ranks."""

    rank: int
    other: int
    what: str
    got: str
    expected: str
    do: str


def _difference(told: Sequence[Mapping[str, Any]], alike: bool) -> _Difference | None:
    """The first that matters, of what ranks have told; `alike` if their processors round so."""
    return _of_settings(told) or _of_passes(told) or _of_owners(told) or _of_weights(told, alike)


def _of_settings(told: Sequence[Mapping[str, Any]]) -> _Difference | None:
    listed = [dict(map(tuple, report["settings"])) for report in told]
    for name in dict.fromkeys(name for report in listed for name in report):
        values = [report.get(name, "(not there)") for report in listed]
        if (pair := _odd(values)) is not None:
            rank, other = pair
            return _Difference(
                rank,
                other,
                name,
                values[rank],
                values[other],
                "let every rank make the same changes: give schedulers that look at a loss "
                "shoal.mean(loss, weight=rows), and load a checkpoint on every rank",
            )
    return None


def _of_passes(told: Sequence[Mapping[str, Any]]) -> _Difference | None:
    passes = [tuple(report["pass"]) for report in told]
    loaders = Counter(loader for loader, _, _ in passes)
    loader = loaders.most_common(1)[0][0]
    there = [rank for rank, report in enumerate(passes) if report[0] == loader != 0]
    for index, what in ((1, "the epoch of the sharded loader"), (2, "the order of its rows")):
        pair = _odd([passes[rank][index] for rank in there])
        if pair is not None:
            rank, other = there[pair[0]], there[pair[1]]
            got, expected = passes[rank][index], passes[other][index]
            return _Difference(
                rank,
                other,
                f"{what} that it trains on (number {loader}, by calls of shoal.shard)",
                str(got) if index == 1 else f"epoch {passes[rank][1]}, digest {got:08x}",
                str(expected) if index == 1 else f"epoch {passes[other][1]}, digest {expected:08x}",
                "make the same passes on every rank, or call loader.set_epoch(epoch)"
                if index == 1
                else "give a sampler with a random source of its own the same seed on every rank. "
                "Where each rank has a stream of its own: shard(loader, shards_itself=True)",
            )
    return None


def _of_owners(told: Sequence[Mapping[str, Any]]) -> _Difference | None:
    """Weights with owners: these send what they have, so that one rank's would be mixed in."""
    names = [report["of owners"] for report in told]
    if _odd(names) is None:
        return None
    rank = max(range(len(names)), key=lambda index: len(names[index]))
    other = min(range(len(names)), key=lambda index: len(names[index]))
    return _Difference(
        rank,
        other,
        f"parameter {next(name for name in names[rank] if name not in names[other])}",
        f"changed by hand, with {len(names[rank]) - 1} others",
        "left as its owner had sent it",
        _LOAD + ". To change them on one rank alone, and put them back, let none have owners: "
        'strategies=["replicate", "factor"]',
    )


def _of_weights(told: Sequence[Mapping[str, Any]], alike: bool) -> _Difference | None:
    changes = [report["changes"] for report in told]
    if _odd(changes) is None:
        return None
    for name in told[0]["weights"]:
        values = [report["weights"].get(name, (0, [])) for report in told]
        pair = _odd([digest for digest, _ in values])
        if pair is None:
            continue
        some = [numbers for _, numbers in values]
        if alike or _unlike(some[pair[0]], some[pair[1]]):
            # who has changed them more often has likely done it
            rank, other = sorted(pair, key=lambda index: -abs(changes[index]))
            return _Difference(
                rank,
                other,
                f"parameter {name}",
                f"changed {changes[rank]} times, by steps or by hand",
                f"{changes[other]} times",
                _LOAD + ". Make as many backwards and steps on each",
            )
    return None


def _unlike(one: Sequence[float], other: Sequence[float]) -> bool:
    largest = max((*one, *other), default=0.0)
    return any(abs(a - b) > _NEARLY * largest for a, b in zip(one, other, strict=True))


def _odd(values: Sequence[Any]) -> tuple[int, int] | None:
    """A rank whose value is not that of most, and one of these; None where all are alike."""
    numbers = Counter(map(repr, values))
    if len(numbers) < 2:
        return None
    most = max(numbers.values())
    usual = next(repr(value) for value in values if numbers[repr(value)] == most)
    odd = next(rank for rank, value in enumerate(values) if repr(value) != usual)
    return odd, next(rank for rank, value in enumerate(values) if repr(value) == usual)


def exchanged(comm: Comm, value: Any) -> list[Any]:
    """Every worker's plain data: by messages, as a lane's channel may have servers."""
    parcel, records = packed(value)
    workers = [rank for rank in comm.others if rank < comm.workers]
    size = torch.tensor([len(parcel)], device="cpu")
    sizes = {rank: torch.empty_like(size) for rank in workers}
    pending = [comm.receive(sizes[rank], rank) for rank in workers]
    comm.finish([*pending, *(comm.send(size, rank) for rank in workers)])
    parcels = {
        rank: torch.empty(int(sizes[rank]), dtype=torch.uint8, device="cpu") for rank in workers
    }
    pending = [comm.receive(parcels[rank], rank) for rank in workers]
    comm.finish([*pending, *(comm.send(parcel, rank) for rank in workers)])
    parcels[comm.rank] = parcel
    return [unpacked(parcels[rank], records) for rank in range(comm.workers)]
