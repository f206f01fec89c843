"""One generation: files of a host's whole tensors, of a rank's pieces, and copies of another's.

    main thread    1  the marks of the slot's old generation are removed
                   2  all is copied into files in the host's memory
    a thread       3  ranks tell the sizes of their pieces, and whether all went well
                   4  pieces go to a rank of the next host, in chunks, spread over the time there is
                   5  hosts compare their checksums with rank 0's: if they differ, rank 0 sends
                      its own
                   6  ranks tell whether all went well; then each writes its marks

Whole tensors are the same on all hosts, so none is sent. Each piece crosses the network once.
A file of a host is written by one rank. Guarded by tests/checkpoint/test_generations.py.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from shoal.checkpoint import tensors
from shoal.checkpoint.extents import Extent, Owned
from shoal.checkpoint.folder import STATE, remove, write_text
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.mapped_file import MappedFile
from shoal.checkpoint.marks import (
    WHOLE,
    Entry,
    Generation,
    PiecesMark,
    WholeMark,
    parse_mark,
    path_of,
    remove_mark,
    text_of,
    unit_of,
    write_mark,
)
from shoal.checkpoint.snapshot import SUFFIX, Snapshot
from shoal.checkpoint.state import State, parsed
from shoal.checkpoint.tensors import Checksums
from shoal.checkpoint.tree import encoded
from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.facts import Topology

CHUNK_BYTES = 1 << 19
_SIZES = "shoal.Checkpoints: sizes of a snapshot in memory"
_STATES = "shoal.Checkpoints: comparing a snapshot in memory"
_COMMIT = "shoal.Checkpoints: whether all hosts have a snapshot in memory"


def next_to(topology: Topology, rank: int) -> int | None:
    """Return the rank of the next host that copies a rank's pieces; None if there is one host."""
    hosts = [*topology.ranks_on.values()]
    if len(hosts) == 1:
        return None
    own = next(place for place, ranks in enumerate(hosts) if rank in ranks)
    following = hosts[(own + 1) % len(hosts)]
    return following[topology.local_ranks[rank] % len(following)]


@dataclass
class Kept:
    """One rank's bytes of a generation, and the seconds that they took.

    Args:
        kept_bytes: own files and copies, in this host's memory.
        copied_bytes: bytes that the training thread has copied.
        sent_bytes: bytes that went to the next host.
        copy_s: seconds of the training thread.
        sent_s: seconds of the background thread, from the first piece to the last.
        problem: the reason why there is no such generation, with the way out.
    """

    kept_bytes: int = 0
    copied_bytes: int = 0
    sent_bytes: int = 0
    copy_s: float = 0.0
    sent_s: float = 0.0
    problem: str = ""


@dataclass
class _OwnPieces:
    """The pieces that this rank has, and their source tensors."""

    entries: list[Entry] = field(default_factory=list)
    sources: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot) -> _OwnPieces:
        pieces = cls()
        for (file, name), spread in snapshot.spreads.items():
            keyword = file.removesuffix(SUFFIX)
            pieces._add(keyword, name, (), Extent.of_cut(spread.cut), spread.part)
        for (keyword, *keys), owned in snapshot.owned:
            pieces._add_owned(keyword, tuple(keys), owned)
        return pieces

    def _add_owned(self, keyword: str, keys: tuple[str, ...], owned: Owned) -> None:
        for extent, value in owned.pieces:
            if isinstance(value, Tensor):
                self._add(keyword, "", keys, extent, value)
            else:
                plain = encoded(value, _no_tensor, (keyword, *keys))
                self.entries.append(Entry(keyword, keys=keys, value=plain))

    def _add(
        self,
        keyword: str,
        name: str,
        keys: tuple[str, ...],
        extent: Extent | None,
        source: Tensor,
    ) -> None:
        number = str(len(self.sources))
        self.sources[number] = source.detach()
        self.entries.append(Entry(keyword, name, keys, number, extent))


def _no_tensor(path: Any, value: Any) -> str:
    raise UsageError(
        f"{'.'.join(path)} cannot be kept in memory",
        got=f"a {type(value).__name__} within a value of the optimizer's state",
        do="leave out in_memory_every",
    )


@final
class Generations:
    """Writes a rank's files of one generation after another, into memory that is used again.

    Args:
        comm: a channel of its own, among all ranks.
        memory: folder of this host.
        run: id of the run.
    """

    def __init__(self, comm: Comm, memory: HostMemory, run: str) -> None:
        self._comm, self._memory, self._run = comm, memory, run
        topology, rank = comm.topology, comm.rank
        self._is_first = topology.local_ranks[rank] == 0
        self._to = next_to(topology, rank)
        self._sources = [r for r in range(comm.size) if next_to(topology, r) == rank]
        self._files: dict[Path, MappedFile] = {}
        self.hurries = threading.Event()  # set while a thread waits for the copying to end

    def take(self, number: int, snapshot: Snapshot, state: State) -> TakenSnapshot:
        """Copy a snapshot into this host's memory, on the main thread.

        An error is kept, because other ranks must hear of it.
        """
        began_s = time.perf_counter()
        generation = Generation(self._run, number, state.step or 0, self._comm.size)
        pieces = _OwnPieces.of(snapshot)
        taken = TakenSnapshot(generation, state, tuple(pieces.entries))
        folder = self._memory.slot(number)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for unit in self._units:
                remove_mark(folder, unit)
            own = self._file(folder, f"{unit_of(self._comm.rank)}{SUFFIX}")
            taken.own = _fill(own, pieces.sources)
            if self._is_first:
                for name in snapshot.forms:
                    whole = self._file(folder, name)
                    taken.wholes[name] = _fill(whole, snapshot.files.get(name, {}))
        except OSError as error:
            taken.kept.problem = self._too_small(error, pieces, snapshot)
        taken.kept.copied_bytes = sum(len(file.memory) for file in taken.files)
        taken.kept.kept_bytes = taken.kept.copied_bytes
        taken.kept.copy_s = time.perf_counter() - began_s
        return taken

    @property
    def _units(self) -> list[str]:
        """Return the units that get their marks from this rank."""
        units = [unit_of(rank) for rank in (self._comm.rank, *self._sources)]
        return [WHOLE, *units] if self._is_first else units

    def _file(self, folder: Path, name: str) -> MappedFile:
        path = folder / name
        return self._files.setdefault(path, MappedFile(path))

    def _too_small(self, error: OSError, pieces: _OwnPieces, snapshot: Snapshot) -> str:
        wholes = [snapshot.files] if self._is_first else []
        sizes = [value.nbytes for of in wholes for file in of.values() for value in file.values()]
        own = sum(value.nbytes for value in pieces.sources.values())
        copies = own * len(self._sources)  # the others have about as much
        return _problem(self._comm, self._memory, error, 2 * (sum(sizes) + own + copies))

    def finish(self, taken: TakenSnapshot, within_s: float) -> Kept:
        """Copy the pieces to the next host, and write the marks once all hosts have theirs.

        A collective, on a background thread. The result has a problem if some rank has one:
        then the generation does not count, and the one before it stays.

        Args:
            taken: the result of `take`.
            within_s: seconds over which the copying may be spread.
        """
        kept, folder = taken.kept, self._memory.slot(taken.generation.number)
        size = 0 if taken.own is None else len(taken.own.memory)
        sizes = self._tell_facts((kept.problem, size), _SIZES, kept)
        if kept.problem:
            return kept
        copies: dict[int, MappedFile] = {}
        try:
            for source in self._sources:
                copies[source] = self._file(folder, f"{unit_of(source)}{SUFFIX}")
                copies[source].reserve(sizes[source][1])
        except OSError as error:
            total = 2 * (kept.kept_bytes + sum(sizes[source][1] for source in self._sources))
            kept.problem = _problem(self._comm, self._memory, error, total)
        self._tell_facts((kept.problem,), _SIZES, kept)
        if kept.problem:
            return kept
        assert taken.own is not None
        began_s = time.perf_counter()
        self._exchange(taken.own.memory, copies, within_s)
        kept.sent_s = time.perf_counter() - began_s
        kept.sent_bytes = 0 if self._to is None else size
        kept.kept_bytes += sum(len(copy.memory) for copy in copies.values())
        marks = self._compare(taken, copies)
        self._tell_facts((kept.problem,), _COMMIT, kept)
        if not kept.problem:
            self._write(folder, taken, marks)
        return kept

    def _tell_facts(self, own: tuple[Any, ...], purpose: str, kept: Kept) -> list[tuple[Any, ...]]:
        """Tell all ranks this rank's facts, and note a problem of any rank."""
        told = [tuple(each) for each in self._comm.gather_objects(own, purpose)]
        kept.problem = next((each[0] for each in told if each[0]), "")
        return told

    def _exchange(self, own: Tensor, copies: Mapping[int, MappedFile], within_s: float) -> None:
        """Send the own pieces to the next host, and receive the pieces that are copied here."""
        comm, began_s = self._comm, time.perf_counter()
        comm.journal.begins(_COMMIT)
        sending = 0 if self._to is None else len(own)
        longest = max((sending, *(len(copy.memory) for copy in copies.values())))
        for begin in range(0, longest, CHUNK_BYTES):
            end = begin + CHUNK_BYTES
            pending = []
            if self._to is not None and begin < sending:
                pending.append(comm.send(own[begin:end], self._to))
            for source, copy in copies.items():
                if begin < len(copy.memory):
                    pending.append(comm.receive(copy.memory[begin:end], source))
            comm.finish(pending)
            due_s = began_s + within_s * min(1.0, end / longest)
            self.hurries.wait(max(0.0, due_s - time.perf_counter()))

    def _compare(self, taken: TakenSnapshot, copies: Mapping[int, MappedFile]) -> dict[str, Any]:
        """Return the marks that this rank writes, by unit, once all hosts are known to be equal."""
        assert taken.own is not None
        rank = self._comm.rank
        own = {taken.own.path.name: taken.own.checksums()}
        mark = PiecesMark(taken.generation, rank, taken.entries, own)
        text, files = "", {}
        if self._is_first:
            files = {name: file.checksums() for name, file in taken.wholes.items()}
            text = replace(taken.state, files=files).text()
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""
        words = text_of(mark).encode()
        told = self._comm.gather_objects((digest, len(words)), _STATES)
        marks: dict[str, Any] = {unit_of(rank): mark}
        for source, theirs in self._bring_mark(words, {r: told[r][1] for r in copies}).items():
            copied = parse_mark(PiecesMark, theirs)
            if copied is None or not _equals_mark(copies[source], copied):
                taken.kept.problem = (
                    f"the copy of rank {source}'s pieces has other checksums. Look at the memory "
                    "of both hosts"
                )
            marks[unit_of(source)] = copied
        unlike = [r for r, (theirs, _) in enumerate(told) if theirs and theirs != told[0][0]]
        if unlike:  # every rank finds the same list
            text = self._as_rank_0(unlike, text, files, taken)
        if self._is_first:
            crc = tensors.checksum(text.encode())
            marks[WHOLE] = WholeMark(taken.generation, crc, tuple(taken.wholes))
            taken.text = text
        return marks

    def _bring_mark(self, own: bytes, sizes: Mapping[int, int]) -> dict[int, bytes]:
        """Send a mark along with the pieces, and return the marks of copies here."""
        comm = self._comm
        coming = {r: torch.empty(n, dtype=torch.uint8, device="cpu") for r, n in sizes.items()}
        pending = [comm.receive(words, source) for source, words in coming.items()]
        if self._to is not None:
            pending.append(comm.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._to))
        comm.finish(pending)
        return {source: words.numpy().tobytes() for source, words in coming.items()}

    def _as_rank_0(
        self, unlike: Sequence[int], text: str, files: Mapping[str, Checksums], taken: TakenSnapshot
    ) -> str:
        """Bring rank 0's whole tensors to hosts that have others (a collective)."""
        comm = self._comm
        first = comm.gather_objects(text if comm.rank == 0 else "", _STATES)[0]
        wanted: list[list[str]] = []
        if comm.rank in unlike:
            theirs = parsed(first.encode(), "the snapshot of rank 0").files
            if _forms_in(theirs) != _forms_in(files):
                taken.kept.problem = (
                    f"rank {comm.rank} has other tensors to save than rank 0. Save the same "
                    "objects on every rank"
                )
            else:
                wanted = [
                    [file, name]
                    for file, checksums in theirs.items()
                    for name in checksums
                    if name != tensors.HEADER and checksums[name] != files[file][name]
                ]
        of_ranks = comm.gather_objects(wanted, _STATES)
        for rank, names in enumerate(of_ranks):
            for file, name in names:
                if comm.rank == 0:
                    comm.send(taken.wholes[file].bytes_of(name), rank).wait()
                elif comm.rank == rank:
                    comm.receive(taken.wholes[file].bytes_of(name), 0).wait()
        return first if comm.rank in unlike else text

    def _write(self, folder: Path, taken: TakenSnapshot, marks: Mapping[str, Any]) -> None:
        """Write the marks, and remove files that belong to no unit any more."""
        if self._is_first:
            write_text(folder / STATE, taken.text)
        for unit, mark in marks.items():
            write_mark(mark, folder, unit)
        if self._is_first:
            self._sweep(folder, taken)

    def _sweep(self, folder: Path, taken: TakenSnapshot) -> None:
        """Remove files that another number of ranks has left in a slot."""
        topology = self._comm.topology
        here = topology.ranks_on[topology.hosts[self._comm.rank]]
        sources = (r for r in range(self._comm.size) if next_to(topology, r) in here)
        units = [unit_of(rank) for rank in (*here, *sources)]
        known = {STATE, path_of(folder, WHOLE).name, *taken.wholes}
        known |= {f"{unit}{end}" for unit in units for end in (SUFFIX, ".json")}
        for path in folder.iterdir():
            if path.name not in known and ".tmp-" not in path.name:
                remove(path)

    def forget(self) -> None:
        """Let the memory of all files go."""
        self._files.clear()

    def remove(self, number: int) -> None:
        """Remove the files of a generation that never came to count."""
        self._files.clear()
        if self._is_first:
            for path in self._memory.slot(number).glob("*"):
                remove(path)


@dataclass
class TakenSnapshot:
    """A snapshot in this host's memory, which is not known to all ranks yet.

    Args:
        generation: the generation.
        state: the state without tensors.
        entries: the pieces of this rank.
        own: file of these pieces.
        wholes: files of whole tensors by name, at a host's first rank.
        text: text of state.json.
        kept: bytes and seconds.
    """

    generation: Generation
    state: State
    entries: tuple[Entry, ...]
    own: MappedFile | None = None
    wholes: dict[str, MappedFile] = field(default_factory=dict)
    text: str = ""
    kept: Kept = field(default_factory=Kept)

    @property
    def files(self) -> list[MappedFile]:
        """Return the files of this rank."""
        return [*([] if self.own is None else [self.own]), *self.wholes.values()]


def _forms_in(files: Mapping[str, Checksums]) -> dict[str, str]:
    return {file: checksums[tensors.HEADER] for file, checksums in files.items()}


def _fill(file: MappedFile, sources: Mapping[str, Tensor]) -> MappedFile:
    """Copy tensors into a file."""
    forms = {name: tensors.form_of(name, tensor) for name, tensor in sources.items()}
    views = file.lay_out_tensors(forms)
    with torch.no_grad():
        for name, tensor in sources.items():
            views[name].copy_(tensor.detach())
    return file


def _equals_mark(copy: MappedFile, mark: PiecesMark) -> bool:
    """Return whether a received file equals the file that was sent."""
    own = {entry.tensor for entry in mark.entries if entry.tensor}
    checksums = mark.files.get(copy.path.name, {})
    if checksums.keys() != own | {tensors.HEADER}:
        return False
    return copy.has(checksums)


def _problem(comm: Comm, memory: HostMemory, error: OSError, needed: int) -> str:
    others = ", ".join(map(str, memory.others()))
    hint = f"; other runs have {others} there" if others else ""
    return (
        f"the memory of host {comm.topology.hosts[comm.rank]} has no room: rank {comm.rank} needs "
        f"{needed / 1e6:,.1f} MB in {memory.folder.parent} for two generations "
        f"({type(error).__name__}: {error.strerror}){hint}. Make room, or leave out in_memory_every"
    )
