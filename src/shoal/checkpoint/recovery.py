"""The newest complete generation, from wherever in the hosts' memory its parts are.

    1  each host's first rank looks at the marks of its two slots, and names them
    2  the newest generation of this run is taken of which, together, hosts have everything
    3  it is read and its checksums are compared; if they differ, the one before is tried
    4  hosts are sent the units that they do not have, once a host
    5  pieces are put together, whole tensors join them, and all is a checkpoint as any

So any number of ranks can go on. Of two neighbouring hosts one may be lost. Guarded by
tests/checkpoint/test_generations.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from shoal.checkpoint import tensors
from shoal.checkpoint.extents import Joining
from shoal.checkpoint.folder import STATE
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.marks import (
    WHOLE,
    Entry,
    Generation,
    PiecesMark,
    WholeMark,
    parse_mark,
    path_of,
    read_mark,
    remove_mark,
    unit_of,
)
from shoal.checkpoint.snapshot import SUFFIX, Saved
from shoal.checkpoint.state import parsed
from shoal.checkpoint.tree import decoded
from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.regular_files import read_bytes

_LOOKING = "shoal.Checkpoints: looking for snapshots in memory"
_READING = "shoal.Checkpoints: reading a snapshot in memory"
_SENDING = "shoal.Checkpoints: bringing a snapshot in memory"


@dataclass(frozen=True)
class Newest:
    """The newest complete generation, and the ranks that have each unit of it.

    Args:
        generation: the generation.
        holders: the first ranks of the hosts that have each unit, by its name.
    """

    generation: Generation
    holders: Mapping[str, Sequence[int]]


@final
class Recovery:
    """Finds and brings a generation (collectives of all ranks).

    Args:
        comm: all ranks.
        memory: folder of this host.
        runs: ids of the run.

    `last_number` is the greatest number of any generation that was found.
    """

    def __init__(self, comm: Comm, memory: HostMemory, runs: Collection[str]) -> None:
        self._comm, self._memory, self._runs = comm, memory, runs
        self._is_first = comm.topology.local_ranks[comm.rank] == 0
        self.last_number = 0

    def newest(self, above: int = -1) -> Newest | None:
        """Return the newest complete generation of more than `above` steps, all of it readable."""
        here = self._here() if self._is_first else []
        of_ranks = self._comm.gather_objects(here, _LOOKING, Generation)
        found: dict[Generation, dict[str, list[int]]] = {}
        for rank, seen in enumerate(of_ranks):
            for generation, unit in seen:
                found.setdefault(generation, {}).setdefault(unit, []).append(rank)
                self.last_number = max(self.last_number, generation.number)
        by_age = sorted(found, key=lambda g: (g.step, g.number), reverse=True)
        for generation in by_age:
            if generation.step > above and _is_complete(generation, found[generation]):
                readable = self._readable(generation, found[generation])
                if _is_complete(generation, readable):
                    return Newest(generation, readable)
        return None

    @staticmethod
    def drop(slot: Path, above: int) -> None:
        """Remove the marks in a slot of generations of more than `above` steps."""
        for unit in _units_in(slot):
            mark = _mark_of(slot, unit)
            if mark is None or mark.generation.step > above:
                remove_mark(slot, unit)

    def _here(self) -> list[tuple[Generation, str]]:
        """Return the units that this host has: each generation with the name of one."""
        here = []
        for slot in self._memory.slots():
            for unit in _units_in(slot):
                mark = _mark_of(slot, unit)
                if mark is None or mark.generation.run not in self._runs:
                    continue
                if unit in (WHOLE, unit_of(getattr(mark, "rank", -1))):
                    here.append((mark.generation, unit))
        return here

    def _readable(
        self, generation: Generation, holders: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Return the holders that have files with the right checksums (a collective)."""
        folder = self._memory.slot(generation.number)
        own = [unit for unit, ranks in sorted(holders.items()) if self._comm.rank in ranks]
        sound = [unit for unit in own if _is_sound(folder, unit)]
        found: dict[str, list[int]] = {}
        for rank, units in enumerate(self._comm.gather_objects(sound, _READING)):
            for unit in units:
                found.setdefault(unit, []).append(rank)
        return found

    def saved(self, newest: Newest) -> Saved:
        """Return the generation as a checkpoint, sent to hosts that lack it (a collective)."""
        comm, folder = self._comm, self._memory.slot(newest.generation.number)
        files: dict[str, bytes] = {}
        for number, unit in enumerate(sorted(newest.holders)):
            holders = newest.holders[unit]
            source = holders[number % len(holders)]
            names = _names(folder, unit) if comm.rank == source else []
            for name in comm.gather_objects(names, _SENDING)[source]:
                files[name] = self._bring(folder / name, source, holders)
        marks = [
            parse_mark(PiecesMark, files[path_of(folder, unit_of(rank)).name])
            for rank in range(newest.generation.ranks)
        ]
        pieces = JoinedPieces()
        for mark in marks:
            assert mark is not None
            name = f"{unit_of(mark.rank)}{SUFFIX}"
            values = tensors.read(folder / name, mark.files[name], files[name])
            for entry in mark.entries:
                pieces.add(entry, values)
        return Saved(folder, parsed(files[STATE], str(folder)), files, pieces)

    def _bring(self, path: Path, source: int, holders: Sequence[int]) -> bytes:
        """Return a file's bytes: read from the file, or received once for each host."""
        comm, topology = self._comm, self._comm.topology
        with_it = {topology.hosts[rank] for rank in holders}
        host = topology.hosts[comm.rank]
        own = read_bytes(path) if host in with_it else b""
        size = comm.numbers([len(own)] * comm.size, _SENDING)[source]
        for name, ranks in topology.ranks_on.items():
            if name in with_it:
                continue
            first, *others = ranks
            if comm.rank == source:
                comm.send(_as_tensor(own), first).wait()
            elif comm.rank == first:
                own = _receive(comm, size, source)
                comm.finish([comm.send(_as_tensor(own), rank) for rank in others])
            elif comm.rank in others:
                own = _receive(comm, size, first)
        return own


def _units_in(slot: Path) -> list[str]:
    """Return the units that have a mark in a slot."""
    names = [path.stem for path in slot.glob("*.json")] if slot.is_dir() else []
    return sorted(name for name in names if f"{name}.json" != STATE)


def _mark_of(slot: Path, unit: str) -> WholeMark | PiecesMark | None:
    if unit == WHOLE:
        return read_mark(WholeMark, slot, unit)
    return read_mark(PiecesMark, slot, unit)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _receive(comm: Comm, size: int, source: int) -> bytes:
    content = torch.empty(size, dtype=torch.uint8, device="cpu")
    comm.receive(content, source).wait()
    return content.numpy().tobytes()


def _is_complete(generation: Generation, holders: Mapping[str, Any]) -> bool:
    return holders.keys() >= {WHOLE, *(unit_of(rank) for rank in range(generation.ranks))}


def _names(folder: Path, unit: str) -> list[str]:
    """Return the names of a unit's files."""
    if unit != WHOLE:
        return [path_of(folder, unit).name, f"{unit}{SUFFIX}"]
    mark = read_mark(WholeMark, folder, unit)
    assert mark is not None
    return [STATE, *mark.files]


def _is_sound(folder: Path, unit: str) -> bool:
    """Return whether all files of a unit have the checksums in its mark."""
    try:
        if unit == WHOLE:
            return _is_sound_whole(folder)
        mark = read_mark(PiecesMark, folder, unit)
        if mark is None:
            return False
        for name, checksums in mark.files.items():
            tensors.read(folder / name, checksums)
    except (OSError, UsageError):
        return False
    return True


def _is_sound_whole(folder: Path) -> bool:
    mark, text = read_mark(WholeMark, folder, WHOLE), read_bytes(folder / STATE)
    if mark is None or mark.text_crc != tensors.checksum(text):
        return False
    state = parsed(text, str(folder))
    for name in mark.files:
        tensors.read(folder / name, state.files[name])
    return mark.files == tuple(state.files)


@final
class JoinedPieces:
    """The joined pieces of all ranks.

    Tensors are kept by file and name, states by keyword and keys.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Joining] = {}
        self._states: dict[tuple[str, tuple[str, ...]], Joining | Any] = {}

    def add(self, entry: Entry, values: Mapping[str, Tensor]) -> None:
        """Add one rank's piece or value.

        Raises:
            ValueError: the piece does not fit the others.
        """
        tensor = values[entry.tensor] if entry.tensor else None
        state = entry.keyword, entry.keys
        if entry.extent is None:
            plain = decoded(entry.value, lambda name: values[name])
            self._states[state] = plain if tensor is None else tensor
            return
        assert tensor is not None
        target: dict[Any, Any] = self._tensors if entry.name else self._states
        key = (entry.keyword + SUFFIX, entry.name) if entry.name else state
        if key not in target:
            target[key] = Joining(entry.extent, tensor.dtype)
        target[key].add(entry.extent, tensor)

    def of_file(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file that ranks had in pieces."""
        return {name: one.whole() for (of, name), one in self._tensors.items() if of == file}

    def put_into(self, keyword: str, value: Any) -> Any:
        """Put the states that owners had into the value of an object, and return that."""
        for (of, keys), state in self._states.items():
            if of == keyword:
                whole = state.whole() if isinstance(state, Joining) else state
                _put(value, keys, whole)
        return value


def _put(value: Any, keys: Sequence[str], state: Any) -> None:
    *way, last = keys
    for key in way:
        value = value[int(key)] if isinstance(value, list) else value.setdefault(key, {})
    value[last] = state
