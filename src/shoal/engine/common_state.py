"""State that ranks must have in common as they train, compared in every backward by one small word.

    settings   of the optimizers' groups: learning rates and all other numbers and words
    pass       the loader, the epoch, the order of its rows, and the position in it
    scalers    the scale of a loss, if a GradScaler steps an optimizer
    weights    the number of changes other than by an optimizer's step

    1  mark      a rank makes a word of 16 bits of all this. It travels with a message that is sent
                 anyway: with one bucket or layer (strategies/marks.py), or with counts of rows
                 (weights.py)
    2  compare   only if words differ, which every rank sees: ranks send the values themselves. A
                 difference that matters is an error that names the rank and the value. If weights
                 that every rank updates were changed and put back, their bits are equal, and that
                 does not matter

A mark costs about 20 µs of one process, and grows with parameters and groups. It looks at their
versions and identities, not at memory. Guarded by tests/equivalence/test_in_common.py.
"""

from __future__ import annotations

import gc
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.contracts.comm import Comm
from shoal.contracts.plain import packed, unpacked
from shoal.contracts.transfer import Mark
from shoal.core.errors import RanksDiffer
from shoal.core.passes import Passes, PassPosition
from shoal.engine.differences import OF_RATE, OF_SCALER, first_difference, with_schedulers
from shoal.engine.lanes import Lane
from shoal.profiling.identity import content
from shoal.tensors.cut import is_cut
from shoal.tensors.guarded_parameters import GuardedParameter

_EVERY = 100  # backwards from one comparison to the next, if no bucket carries marks
_ELEMENTS = 4  # number of elements of a parameter to compare
_NOTHING = object()
_OPEN = (list, dict, Tensor)  # types of values that may be changed in place


@final
class Common:
    """State of one model on one rank that all ranks must have in common.

    Args:
        model: the parallelised model.
        optimizers: the optimizers that train it.
        passes: the passes over the loaders of the session.
        changed: returns the parameters with owners that were changed other than by them.
        scaled: returns the state of the GradScaler that steps an optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        passes: Passes,
        changed: Callable[[], list[Tensor]] = list,
        scaled: Callable[[Optimizer], Mapping[str, float]] = lambda optimizer: {},
    ) -> None:
        self._settings = [_OptimizerSettings(optimizer, scaled) for optimizer in optimizers]
        self._passes, self._changed = passes, changed
        self._whole = {
            name: p
            for name, p in model.named_parameters()
            if not is_cut(p) and not p.is_inference()
        }
        self._plain = {n: p for n, p in self._whole.items() if not isinstance(p, GuardedParameter)}
        self._before = self._versions()  # the versions that all ranks have agreed to
        self._known: _CommonMark | None = None

    def mark(self, where: str) -> Mark:
        """Note this rank's present values. Ranks may compare them after training has gone on."""
        settings = tuple([groups.digests() for groups in self._settings])
        current = self._passes.current()
        of_pass = (
            (current.loader, current.epoch, current.order, current.position)
            if current
            else (0, 0, 0, PassPosition())
        )
        of_owners = self._changed()
        has = settings, of_pass, self._versions() - self._before, len(of_owners)
        known = self._known
        is_known = known is not None and has == known.has
        word = known.word if known and is_known else zlib.crc32(repr(has).encode()) & 0xFFFF
        self._known = _CommonMark(
            self,
            where,
            has,
            word,
            tuple(map(self._name, of_owners)),
            [groups.noted() for groups in self._settings],
            self._passes.positions(),
        )
        return self._known

    def _versions(self) -> int:
        return sum([p._version for p in self._plain.values()])

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, p in self._whole.items() if p is parameter), "(of another)")

    def agree(self, changes: int) -> None:
        """Forget so many changes, because ranks have the same values in the end."""
        self._before += changes

    def schedulers(self) -> dict[str, str]:
        """Return the numbers that the optimizers' schedulers have."""
        return scheduler_states([groups.optimizer for groups in self._settings])

    def told(self, mark: _CommonMark) -> dict[str, Any]:
        """Return all values that the ranks compare, as plain data."""
        return {
            "settings": [text for noted in mark.settings for text in noted.texts()],
            "pass": list(mark.has[1][:3]),
            "places": [list(place) for place in mark.places],
            "changes": mark.has[2],
            "of owners": list(mark.of_owners),
            "weights": {name: _looked_at(p) for name, p in self._plain.items()},
        }


@final
@dataclass(frozen=True)
class _CommonMark(Mark):
    """Word of one rank in one round, and all values that it stands for."""

    common: Common
    where: str
    has: tuple[tuple[tuple[float, ...], ...], tuple[int, int, int, PassPosition], int, int]
    word: int
    of_owners: tuple[str, ...]  # names of parameters with owners that were changed here
    settings: Sequence[_NotedSettings]
    places: Sequence[PassPosition]

    def compare(self, comm: Comm) -> None:
        told = exchanged(comm, self.common.told(self))
        odd = first_difference(told, alike=len(set(comm.topology.processors)) < 2)
        if odd is None:
            self.common.agree(self.has[2])
            return
        if odd.what.endswith(OF_RATE):
            odd = with_schedulers(odd, exchanged(comm, self.common.schedulers()))
        raise RanksDiffer(
            f"rank {odd.rank} and rank {odd.other} have come to differ: {odd.what}",
            where=self.where,
            got=f"rank {odd.rank}: {odd.got}",
            expected=f"as on rank {odd.other}: {odd.expected}",
            do=odd.do,
            rank=odd.rank,
        )


@final
class NowAndThen:
    """Comparisons now and then, if no bucket can carry the words of ranks in each backward.

    On a GPU a look at the sums of a bucket would wait for the device. There ranks tell their words
    after the second backward, and after every hundredth, by one small message to every other rank.

    Args:
        common: the values of this rank.
        lane: a lane among the ranks that train.
    """

    def __init__(self, common: Common, lane: Lane) -> None:
        self._common, self._lane = common, lane
        self._backwards = 0

    def on_backward_end(self) -> None:
        """Count a backward that has sent. Compare if it is time (a collective).

        Raises:
            RanksDiffer: a value differs, and matters.
        """
        self._backwards += 1
        if self._backwards != 2 and self._backwards % _EVERY:
            return
        where = f"backward {self._backwards - 1}"
        mark = self._common.mark(where)

        def compare(comm: Comm) -> None:
            if len(set(exchanged(comm, mark.word))) > 1:
                mark.compare(comm)

        self._lane.run(compare, "comparing what ranks have in common").wait(where)


@final
class _OptimizerSettings:
    """Settings of one optimizer's groups, and the state of its GradScaler."""

    def __init__(
        self, optimizer: Optimizer, scaled: Callable[[Optimizer], Mapping[str, float]]
    ) -> None:
        self.optimizer, self._scaled = optimizer, scaled
        self._kind = type(optimizer).__name__
        self._seen: list[_GroupDigest] = []

    def digests(self) -> tuple[float, ...]:
        """Return a digest of each group as it is now, and the numbers of the scaler."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._seen):
            self._seen = [_GroupDigest() for _ in groups]
        digests = [seen.digest(group) for seen, group in zip(self._seen, groups, strict=True)]
        return (*digests, *self._scaled(self.optimizer).values())

    def noted(self) -> _NotedSettings:
        """Return the settings at the time of the last digests."""
        return _NotedSettings(
            self._kind, [seen.texts for seen in self._seen], self._scaled(self.optimizer)
        )


class _NotedSettings(NamedTuple):
    """Settings of an optimizer at one moment, independent of later changes."""

    kind: str
    groups: Sequence[Sequence[tuple[str, str]]]  # name and value of each setting
    scaled: Mapping[str, float]

    def texts(self) -> list[tuple[str, str]]:
        """Return each setting's name in messages, and its value."""
        return [
            *((f"{OF_SCALER} {self.kind}: {name}", repr(v)) for name, v in self.scaled.items()),
            *(
                (f"{self.kind}.param_groups[{number}][{name!r}]", text)
                for number, group in enumerate(self.groups)
                for name, text in group
            ),
        ]


@final
class _GroupDigest:
    """Settings of a group when they were last read.

    An object that is still the same is not read again.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._texts: list[str] = []
        self._digest = 0
        self.texts: Sequence[tuple[str, str]] = ()  # names and values; never changed in place

    def digest(self, group: Mapping[str, Any]) -> int:
        """Return a digest of the present settings."""
        values, texts = self._values, self._texts
        if len(values) != len(group):
            values[:], texts[:] = [_NOTHING] * len(group), [""] * len(group)
        changed = False
        for index, (name, value) in enumerate(group.items()):
            if value is values[index] and not isinstance(value, _OPEN):
                continue
            values[index] = value
            text = "" if name == "params" else _text(value)
            if text != texts[index]:
                texts[index], changed = text, True
        if changed:
            self.texts = [(name, text) for name, text in zip(group, texts, strict=True) if text]
            self._digest = zlib.crc32(repr(self.texts).encode())
        return self._digest


def _text(value: Any) -> str:
    """Write numbers and words, and the value of a one-element tensor on the host; '' for all
    others.
    """
    if isinstance(value, Tensor):
        is_told = value.numel() == 1 and value.device.type == "cpu"
        return repr(value.item()) if is_told else ""
    if not _is_plain(value):
        return ""
    return repr(list(value) if isinstance(value, tuple) else value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _looked_at(parameter: nn.Parameter) -> tuple[int, list[float]]:
    """Return a digest of all bits of a parameter, and some elements."""
    value = parameter.detach()
    ends = value[tuple(slice(None, None, max(1, size - 1)) for size in value.shape)]
    some = ends.reshape(-1)[:_ELEMENTS].abs().double().tolist()
    return int.from_bytes(hashlib.blake2b(content(value), digest_size=4).digest(), "big"), some


def scheduler_states(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the numbers that the schedulers of some optimizers have, by name.

    An optimizer does not know its schedulers. Only an error needs them, so all objects of the
    process are searched.
    """
    found: dict[str, str] = {}
    for scheduler in gc.get_objects():
        if not issubclass(type(scheduler), LRScheduler):
            continue
        if any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers):
            for name, value in vars(scheduler).items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    found[f"{type(scheduler).__name__}.{name}"] = repr(value)
    return found


def exchanged(comm: Comm, value: Any) -> list[Any]:
    """Exchange plain data among all workers.

    It uses messages, because a lane's channel may have servers.
    """
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
