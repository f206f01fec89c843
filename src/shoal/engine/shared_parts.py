"""Parts of a model that this rank has, for a rank that reads them alone.

They are read between two steps, under a lock that a step takes. The reader names the step after
which it reads. This rank sends its parts once it has made that step. If it has gone further, the
reading is an error. The reader keeps the parts until its next step or training forward. Parts
outlive the model: the program of one rank may be at its end while another one saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.attendance import Wanted
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer
from shoal.tensors.cut import SpreadCut, cut_of, is_cut, part_of

_LOOK_S = 0.01  # seconds between two looks whether this rank has made its step
_NEVER_S = 90.0  # a main thread that waits for so long makes no step

Stamp = tuple[int, int]  # steps so far, and later changes by hand
# the cut, the key of the whole, and the part
KeyedParts = Sequence[tuple[SpreadCut, Any, Tensor]]


@dataclass(frozen=True)
class PartsRequest:
    """Request for parts.

    Args:
        wanted: the kind of values.
        tally: number of tensors of which the reader has parts.
        stamp: the step after which it reads.
    """

    wanted: int = Wanted.NOTHING
    tally: int = 0
    stamp: Stamp = (0, 0)


class StatesOfOwners(Protocol):
    """States of an optimizer that owners have in pieces."""

    def gather(self, comm: Comm, steps: int) -> Any:
        """Return the states of all ranks as they are after so many steps (a collective)."""


@final
class SharedParts:
    """Parts of one model on this rank, and the whole tensors that it has read alone.

    Args:
        model: the module.
        boundary: the channel by which the model's cut parameters are known; None if none is cut.
        memory_limit: bytes that a rank may hold between steps, if there is a limit.
    """

    def __init__(self, model: nn.Module, boundary: Comm | None, memory_limit: float | None) -> None:
        self._model, self._boundary, self._limit = ref(model), boundary, memory_limit
        self._kept: KeyedParts = ()  # parts of parameters
        self.states: list[Callable[[], KeyedParts]] = []  # states of optimizers
        self.owned: list[StatesOfOwners] = []
        self.wholes: dict[Any, Tensor] = {}  # whole parameters that this rank has read alone
        self.read_states: dict[Any, Any] = {}  # states that this rank has read alone
        self.stamp: Stamp = (0, 0)
        self.lock = threading.RLock()  # held while parts change, or are sent
        self.closed = False

    def keep(self) -> None:
        """Note the parts of parameters as they are now."""
        model = self._model()
        if model is None:
            return
        cuts = [(cut_of(p), part_of(p)) for p in model.parameters() if is_cut(p)]
        self._kept = [
            (cut, cut, part)
            for cut, part in cuts
            if isinstance(cut, SpreadCut) and cut.comm is self._boundary
        ]

    def free(self) -> None:
        """Free all that this rank has read."""
        if self.wholes or self.read_states:
            self.wholes, self.read_states = {}, {}

    def close(self) -> None:
        """Stop serving. From now on all ranks read parts together."""
        self.closed = True
        if self._boundary is not None:
            self._boundary.attendance = None
        self.free()

    def of_kind(self, wanted: int) -> KeyedParts:
        """Return this rank's parts of one kind, in the same order on every rank."""
        if wanted == Wanted.STATES:
            return [part for states in self.states for part in states()]
        if wanted != Wanted.PARAMETERS:
            return ()
        self.keep()
        return self._kept

    def give(self, comm: Comm, to: int, request: PartsRequest) -> None:
        """Send this rank's parts as they are after the requested step."""
        with self._behind(comm, request.stamp) as here:
            parts = self.of_kind(request.wanted)
            is_given = here == request.stamp and len(parts) == request.tally
            sends = [comm.send(_header(is_given, here), to)]
            if is_given:
                own = (part.contiguous() for _, _, part in parts if part.numel())
                sends += [comm.send(part, to) for part in own]
            comm.finish(sends)

    def take(self, comm: Comm, request: PartsRequest) -> int:
        """Receive the other ranks' parts, and join them. Return the number of bytes.

        Raises:
            RanksDiffer: a rank has changed its parts by now.
        """
        headers = {rank: _header(False, (0, 0)) for rank in comm.others}
        comm.finish([comm.receive(words, rank) for rank, words in headers.items()])
        given = [rank for rank, words in headers.items() if words[0]]
        parts, coming, nbytes = self.of_kind(request.wanted), [], 0
        for cut, _, part in parts:
            pieces = [part.new_empty(numel) for numel in cut.numels()]
            pending = [comm.receive(pieces[rank], rank) for rank in given if pieces[rank].numel()]
            coming.append((pieces, pending))
        wholes: dict[Any, Tensor] = {}
        for cut, key, part in parts:
            pieces, pending = coming.pop(0)
            comm.finish(pending)
            pieces[comm.rank] = part.reshape(-1)
            nbytes += sum(pieces[rank].nbytes for rank in given)
            wholes[key] = cut.joined(pieces)
        late = next((rank for rank in headers if rank not in given), None)
        if late is not None:
            raise _changed(late, comm.rank, headers[late].tolist(), request)
        if request.wanted == Wanted.PARAMETERS:
            self.wholes = wholes
        else:
            self.read_states = wholes
        return nbytes

    def gather(self, comm: Comm, reader: int, request: PartsRequest) -> int:
        """Gather the states of owners on every rank, for one reader. Return their bytes.

        Raises:
            RanksDiffer: a rank has not made the requested step, and will not make it.
        """
        with self._behind(comm, request.stamp) as here:
            # a main thread may be steps ahead of its lanes, which wait for the reader's gradients
            own = _header(here[0] >= request.stamp[0], here)
            headers = [torch.empty_like(own) for _ in range(comm.size)]
            comm.all_gather(headers, own)
            late = next((rank for rank, words in enumerate(headers) if not words[0]), None)
            if late is not None:
                raise _changed(late, reader, headers[late].tolist(), request)
            gathered = {owned: owned.gather(comm, request.stamp[0]) for owned in self.owned}
        if reader == comm.rank:
            self.read_states = gathered
        leaves = pytree.tree_leaves([*gathered.values()])
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def missing(self, parts: KeyedParts) -> str:
        """Return the reason why the whole tensors do not fit here, in words; '' if they fit."""
        if not parts:
            return ""
        needed = sum(sum(cut.numels()) * part.itemsize for cut, _, part in parts)
        free, words = _free_bytes(parts[0][2].device), f"{needed / 1e6:.3g} MB"
        if self._limit is not None and needed > self._limit:
            return f"{words}, and a memory_limit of {self._limit / 1e6:.3g} MB"
        if free is None or needed <= free:
            return ""
        return f"{words}, and {free / 1e6:.3g} MB free"

    @contextmanager
    def _behind(self, comm: Comm, stamp: Stamp) -> Iterator[Stamp]:
        """Wait until this rank has made that step, and stop it from going further inside.

        Yields the position of this rank: it may have gone further already, or make no more steps.
        """
        waiting_since: float | None = None
        while True:
            with self.lock:
                is_stuck = waiting_since and time.monotonic() - waiting_since > _NEVER_S
                if self.stamp >= stamp or is_stuck or self.closed:
                    yield self.stamp
                    return
            time.sleep(_LOOK_S)
            if not comm.journal.is_waiting():
                waiting_since = None
            elif waiting_since is None:
                waiting_since = time.monotonic()


def _header(is_given: bool, stamp: Stamp) -> Tensor:
    return torch.tensor([is_given, *stamp], dtype=torch.int64, device="cpu")


def _changed(rank: int, reader: int, header: Sequence[int], request: PartsRequest) -> RanksDiffer:
    _, steps, changes = header
    return RanksDiffer(
        f"rank {reader} alone reads parameters or states, of which rank {rank} has other ones",
        got=f"rank {rank}: after step {steps}, {changes} changes later",
        expected=f"as rank {reader}: after step {request.stamp[0]}, "
        f"{request.stamp[1]} changes later",
        do="read them behind optimizer.step(), before anything changes them, or on every rank. "
        "Change them on every rank alike",
        rank=rank,
    )


def _free_bytes(device: torch.device) -> int | None:
    """Return the number of free bytes on a device; None if it is unknown."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAv")), None)
