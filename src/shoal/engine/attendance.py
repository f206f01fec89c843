"""Attendance over a lane: ranks meet before a call that all make, and serve one that is alone.

    rank 0                           rank 1, which waits in the next forward
    reads a weight, is alone
    states "reading" ──────────▶     is summoned (comm/places.py)
               ◀──────────────────   its lane states for it: "elsewhere"
    takes the parts  ◀────────────   its lane sends them
    works on the whole, frees it

A meeting is one exchange of statements, and every rank is in every meeting, by its main thread or
by its lane. So all know the same of each. If all have come for the same purpose, they go on
together. If not, the parts go to each rank that wants them, in the same exchange.

Parts are read between two steps, under a lock that a step takes. A rank that is alone says after
which step it reads. The others wait until they are there. If one has gone further, that is an
error. A rank keeps what it has read until its next step or training forward.

Costs nothing in training. A call of all ranks costs what `Comm.numbers` does, and a switch of
threads. A rank that is alone waits about a second for the others' lanes. Guarded by tests/alone/.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final
from weakref import ref

import torch
from torch import Tensor, nn

from shoal.contracts.attendance import Attendance, Wanted
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.free_memory import free_bytes
from shoal.engine.lanes import Errand, Lane
from shoal.tensors.cut import SpreadCut, cut_of, is_cut, part_of

_PURPOSE = "who takes part"
_STRIDE = 1 << 20  # numbers of the channel that belong to one meeting
_AT_ONCE_S = 0.02  # a meeting of ranks that all come takes less
_ELSEWHERE_S = 0.4  # a main thread that waits elsewhere for so long is taken not to come
_PATIENCE_S = 10.0  # the same for one that computes, or waits outside of Shoal and torch
_LOOK_S = 0.01  # between two looks whether this rank has done its step
_NEVER_S = 90.0  # a main thread that waits for so long does no step
_LOGGER = logging.getLogger("shoal")

Parts = Sequence[tuple[SpreadCut, Any, Tensor]]  # the cut, the key of the whole, and the part
Stamp = tuple[int, int]  # steps so far, and changes by hand since


class StatesOfOwners(Protocol):
    """States of which owners have pieces."""

    def gather(self, comm: Comm, steps: int) -> Any:
        """Return the states of all ranks as they are after so many steps (a collective)."""


@dataclass(frozen=True)
class _Statement:
    """What a rank says in a meeting."""

    number: int = 0
    digest: int = 0  # of the purpose; 0: elsewhere
    wanted: int = 0
    tally: int = 0  # tensors that are wanted
    stamp: Stamp = (0, 0)

    def words(self) -> Tensor:
        values = [self.number, self.digest, self.wanted, self.tally, *self.stamp]
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    @classmethod
    def read(cls, words: Tensor) -> _Statement:
        number, digest, wanted, tally, steps, changes = words.tolist()
        return cls(number, digest, wanted, tally, (steps, changes))


@dataclass
class _Meeting:
    """One meeting, as this rank sees it."""

    own: Sequence[_Statement]  # for each rank
    heard: list[_Statement] = field(default_factory=list)
    error: RanksDiffer | None = None
    nbytes: int = 0  # of what has come

    @property
    def together(self) -> bool:
        """Whether all ranks have come for the same purpose."""
        digests = {statement.digest for statement in self.heard}
        return len(digests) == 1 and 0 not in digests


@final
class LaneAttendance(Attendance):
    """The attendance of the ranks that train one model.

    Args:
        model: the module.
        boundary: the channel by which the model's cut parameters are known.
        comm: a channel of its own.
        device: where the model is, if that computes in streams.
        memory_limit: bytes that a rank may hold between steps, if there is a limit.
    """

    def __init__(
        self,
        model: nn.Module,
        boundary: Comm | None,
        comm: Comm,
        device: torch.device | None = None,
        memory_limit: float | None = None,
    ) -> None:
        self._model, self._boundary, self._comm = ref(model), boundary, comm
        self._lane = Lane(comm, "attendance", device)
        self.states: list[Callable[[], Parts]] = []  # of the optimizers' parts
        self.owned: list[StatesOfOwners] = []  # of the optimizers
        self._kept: Parts = ()  # parameters, also when the model is gone
        self._wholes: dict[Any, Tensor] = {}  # parameters that this rank has read alone,
        self._states: dict[Any, Any] = {}  # and states
        self._memory_limit = memory_limit
        self._stamp: Stamp = (0, 0)
        self._stepping = threading.RLock()  # while parts change, or are sent
        self._meeting = threading.Lock()  # while a meeting begins
        self._begun = 0
        self._summons = _Summons()
        self._main = threading.get_ident()
        self._has_told = self._closed = False
        comm.may_attend(self._attend)

    @property
    def steps(self) -> int:
        return self._stamp[0]

    def numbers(
        self, numbers: Sequence[int], purpose: str, wanted: Wanted = Wanted.PARAMETERS
    ) -> list[int] | None:
        self._main = threading.get_ident()
        has_copy = bool(self._wholes) and wanted is Wanted.PARAMETERS
        if has_copy and self._summons.number <= self._begun:
            return None
        self._states = {}
        numbers = numbers or [0] * self._comm.size
        parts = () if has_copy else self._parts(wanted)
        missing = _missing(parts, self._memory_limit)
        meeting = self._stated(numbers, purpose, Wanted.NOTHING if missing else wanted, len(parts))
        begin_s = time.monotonic()
        with self._meeting:
            errand = self._begin(meeting)
        self._wait(errand, purpose)
        if meeting.together:
            self.free()  # what one rank keeps may be less than all need now
            return [statement.number for statement in meeting.heard]
        if missing:
            raise _too_large(self._who, purpose, missing)
        if wanted is Wanted.CHANGING:
            raise _changing(self._who, purpose)
        if meeting.error is not None:
            raise meeting.error
        self._tell(purpose, meeting.nbytes, time.monotonic() - begin_s)
        return None

    def whole(self, key: Any) -> Tensor:
        whole: Tensor = self._states[key] if key in self._states else self._wholes[key]
        return whole

    def state(self, owned: Any) -> Any:
        return self._states.pop(owned)

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._stepping:
            yield
            steps, changes = self._stamp
            self._stamp = steps, changes + 1
            self.free()

    def step_begins(self) -> None:
        self._stepping.acquire()
        self.free()

    def step_ends(self) -> None:
        if self._stepping._is_owned():  # type: ignore[attr-defined]
            self._stamp = self._stamp[0] + 1, 0
            self._stepping.release()

    def free(self) -> None:
        """Free what this rank has read alone."""
        if self._wholes or self._states:
            self._wholes, self._states = {}, {}

    def drain(self) -> None:
        """Nobody waits for the lane but other ranks."""

    def abandon(self) -> None:
        """Leave what is still to be done: this rank ends for an error."""
        self._end()
        self._lane.abandon()

    def close(self) -> None:
        """End the lane, and give back its channel."""
        self._end()
        self._lane.close()

    def _end(self) -> None:
        self._closed = True
        if self._boundary is not None:
            self._boundary.attendance = None  # from here on parts are read by all ranks together
        self._comm.may_attend(None)
        self.free()

    @property
    def _who(self) -> str:
        return f"rank {self._comm.rank} of {self._comm.size}"

    def _stated(self, numbers: Sequence[int], purpose: str, wanted: Wanted, tally: int) -> _Meeting:
        digest = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=7).digest(), "little")
        stamp = self._stamp
        return _Meeting([_Statement(n, digest, wanted, tally, stamp) for n in numbers])

    def _begin(self, meeting: _Meeting) -> Errand:
        """Have the lane hold a meeting. The caller has the lock."""
        self._begun += 1
        return self._lane.run(
            lambda comm: self._meet(comm, meeting), _PURPOSE, self._begun * _STRIDE
        )

    def _wait(self, errand: Errand, purpose: str) -> None:
        """Wait for a meeting. The others are summoned at once if they do not come at once."""
        if not errand.is_done(_AT_ONCE_S):
            self._comm.check(purpose, errand.number)
        errand.wait(purpose)
        self._comm.reached(purpose)

    def _attend(self, number: int, waits: bool) -> None:
        """On any thread: others wait at a meeting to which this rank has not come.

        Args:
            number: of the channel.
            waits: whether the main thread waits for something else.
        """
        number //= _STRIDE
        with self._meeting:
            if self._closed or number <= self._begun:
                return
            elsewhere = waits or _is_in_torch(self._main)
            if self._summons.is_over(number, elsewhere):
                self._begin(_Meeting([_Statement(stamp=self._stamp)] * self._comm.size))

    def _meet(self, comm: Comm, meeting: _Meeting) -> None:
        """Hold a meeting, on the lane."""
        words = [statement.words() for statement in meeting.own]
        heard = [torch.empty_like(own) for own in words]
        comm.all_to_all(heard, words)
        meeting.heard = [_Statement.read(theirs) for theirs in heard]
        if meeting.together:
            return
        for rank, statement in enumerate(meeting.heard):
            if statement.wanted == Wanted.OWNED:
                self._gather(comm, rank, statement, meeting)
            elif statement.wanted in (Wanted.NOTHING, Wanted.CHANGING):
                continue
            elif rank == comm.rank:
                self._take(comm, statement, meeting)
            else:
                self._give(comm, rank, statement)

    def _parts(self, wanted: int) -> Parts:
        """The parts of one kind that this rank has, in the same order on every rank."""
        if wanted == Wanted.STATES:
            return [part for states in self.states for part in states()]
        if wanted != Wanted.PARAMETERS:
            return ()
        self.keep()
        return self._kept

    def keep(self) -> None:
        model = self._model()
        if model is None:
            return
        cuts = [(cut_of(p), part_of(p)) for p in model.parameters() if is_cut(p)]
        self._kept = [
            (cut, cut, part)
            for cut, part in cuts
            if isinstance(cut, SpreadCut) and cut.comm is self._boundary
        ]

    @contextmanager
    def _behind(self, stamp: Stamp) -> Iterator[Stamp]:
        """Wait until this rank has done that step, and keep it from going further inside.

        Gives how far it is: it may have gone further already, or do no step any more.
        """
        waiting_since: float | None = None
        while True:
            with self._stepping:
                is_stuck = waiting_since and time.monotonic() - waiting_since > _NEVER_S
                if self._stamp >= stamp or is_stuck or self._closed:
                    yield self._stamp
                    return
            time.sleep(_LOOK_S)
            if not self._comm.is_waiting():
                waiting_since = None
            elif waiting_since is None:
                waiting_since = time.monotonic()

    def _give(self, comm: Comm, to: int, asked: _Statement) -> None:
        """Send this rank's parts as they are behind the step that was asked for."""
        with self._behind(asked.stamp) as here:
            parts = self._parts(asked.wanted)
            is_given = here == asked.stamp and len(parts) == asked.tally
            sends = [comm.send(_header(is_given, here), to)]
            if is_given:
                own = (part.contiguous() for _, _, part in parts if part.numel())
                sends += [comm.send(part, to) for part in own]
            comm.finish(sends)

    def _gather(self, comm: Comm, asking: int, asked: _Statement, meeting: _Meeting) -> None:
        """Gather the states that owners have, on every rank, for one."""
        with self._behind(asked.stamp) as here:
            # a main thread may be steps ahead of its lanes, which wait for the one that asks
            own = _header(here[0] >= asked.stamp[0], here)
            headers = [torch.empty_like(own) for _ in range(comm.size)]
            comm.all_gather(headers, own)
            late = [rank for rank, words in enumerate(headers) if not words[0]]
            if late:
                meeting.error = _changed(late[0], asking, headers[late[0]].tolist(), asked)
                return
            for owned in self.owned:
                states = owned.gather(comm, asked.stamp[0])
                if asking == comm.rank:
                    self._states[owned] = states

    def _take(self, comm: Comm, asked: _Statement, meeting: _Meeting) -> None:
        """Receive the other ranks' parts, and join them."""
        headers = {rank: torch.empty(3, dtype=torch.int64, device="cpu") for rank in comm.others}
        comm.finish([comm.receive(words, rank) for rank, words in headers.items()])
        parts = [*self._parts(asked.wanted)]
        given = [rank for rank, words in headers.items() if words[0]]
        coming = []
        for cut, _, part in parts:
            pieces = [part.new_empty(numel) for numel in cut.numels()]
            pending = [comm.receive(pieces[r], r) for r in given if pieces[r].numel()]
            coming.append((pieces, pending))
        wholes: dict[Any, Tensor] = {}
        for cut, key, part in parts:
            pieces, pending = coming.pop(0)
            comm.finish(pending)
            pieces[comm.rank] = part.reshape(-1)
            meeting.nbytes += sum(pieces[rank].nbytes for rank in given)
            wholes[key] = cut.joined(pieces)
        if len(given) < len(headers):
            rank = next(rank for rank in headers if rank not in given)
            meeting.error = _changed(rank, comm.rank, headers[rank].tolist(), asked)
        elif asked.wanted == Wanted.PARAMETERS:
            self._wholes = wholes
        else:
            self._states = wholes

    def _tell(self, purpose: str, nbytes: int, seconds: float) -> None:
        if self._has_told or not nbytes:
            return
        self._has_told = True
        _LOGGER.warning(
            f"shoal: rank {self._comm.rank} alone came to: {purpose}. Layers are cut over the "
            f"ranks, so it took the other ranks' parts, {nbytes / 1e6:.3g} MB in {seconds:.2g} s, "
            "and keeps them until its next step. It is quicker if every rank takes part"
        )


@final
class _Summons:
    """Summons to a meeting, and how long this rank has not come to it."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._elsewhere_since: float | None = None

    def is_over(self, number: int, elsewhere: bool) -> bool:
        """Note one more summons; return whether the main thread is taken not to come."""
        now = time.monotonic()
        if number != self.number:
            self.number, self._since, self._elsewhere_since = number, now, None
        if not elsewhere:
            self._elsewhere_since = None
        elif self._elsewhere_since is None:
            self._elsewhere_since = now
        since = self._elsewhere_since
        return now - self._since > _PATIENCE_S or (since is not None and now - since > _ELSEWHERE_S)


def _header(is_given: bool, stamp: Stamp) -> Tensor:
    return torch.tensor([is_given, *stamp], dtype=torch.int64, device="cpu")


def _is_in_torch(thread: int) -> bool:
    """Return whether a thread is inside a call of torch.distributed, such as a barrier."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed")


def _missing(parts: Parts, limit: float | None) -> str:
    """Return in words why the wholes do not fit; '' if they fit."""
    if not parts:
        return ""
    needed = sum(sum(cut.numels()) * part.itemsize for cut, _, part in parts)
    free = free_bytes(parts[0][2].device)
    words = f"{needed / 1e6:.3g} MB"
    if limit is not None and needed > limit:
        return f"{words}, and a memory_limit of {limit / 1e6:.3g} MB"
    return f"{words}, and {free / 1e6:.3g} MB free" if free is not None and needed > free else ""


def _too_large(who: str, purpose: str, missing: str) -> UsageError:
    return UsageError(
        f"one rank alone came to: {purpose}; it needs all of the parameters, which do not fit",
        where=who,
        got=missing,
        do="let every rank take part: evaluate, and read the state, on all ranks alike",
    )


def _changing(who: str, purpose: str) -> RanksDiffer:
    return RanksDiffer(
        f"one rank alone came to: {purpose}, between backward and optimizer.step()",
        where=who,
        do="read it behind optimizer.step(), or on every rank",
    )


def _changed(rank: int, own: int, header: Sequence[int], asked: _Statement) -> RanksDiffer:
    _, steps, changes = header
    return RanksDiffer(
        f"rank {own} alone reads parameters, of which rank {rank} has other ones by now",
        got=f"rank {rank}: after step {steps}, {changes} changes later",
        expected=f"as rank {own}: after step {asked.stamp[0]}, {asked.stamp[1]} changes later",
        do="read parameters behind optimizer.step(), before anything changes them, or on every "
        "rank; and change them on every rank alike",
        rank=rank,
    )
