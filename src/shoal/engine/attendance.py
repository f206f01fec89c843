"""Attendance over a lane: ranks meet before a call that all make, and serve a rank that is alone.

    rank 0                           rank 1, which waits in the next forward
    reads a weight, is alone
    states "reading"  ────────────▶  is summoned (comm/wait_places.py)
               ◀───────────────────  its lane states for it: "elsewhere"
    takes the parts  ◀─────────────  its lane sends them (shared_parts.py)
    works on the whole, frees it

A meeting is one exchange of statements. Every rank is in every meeting, by its main thread or by
its lane, so all know its result. If all have come for the same purpose, they go on together. If
not, each rank that wants the parts gets them in the same meeting. A lane states for its rank as
soon as the main thread waits elsewhere: in an exchange of Shoal, in torch.distributed, or at the
end of the program.

If a gradient may come back through the reading of an output, a rank that is only slow must not
count as elsewhere. So its lane says whether that is certain: it is, if the rank waits for one that
is at the meeting. If it is not certain, readers meet again. Such a meeting is held on the main
thread.

A step of training costs nothing more, because a meeting replaces `Comm.numbers`. A call without
gradients costs one more switch of threads. A rank that is alone waits about a second for the
others' lanes. Guarded by tests/alone/.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from shoal.contracts.attendance import (
    Attendance,
    MainWait,
    OutputKey,
    Reading,
    SharedOutput,
    Wanted,
)
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, ShoalError, UsageError
from shoal.engine.lanes import Errand, Lane
from shoal.engine.shared_outputs import SharedOutputs
from shoal.engine.shared_parts import PartsRequest, SharedParts

_PURPOSE = "attendance"
_STRIDE = 1 << 20  # numbers of the channel that belong to one meeting
_AT_ONCE_S = 0.02  # limit of a meeting to which all ranks come at once
_ELSEWHERE_S = 0.4  # seconds elsewhere after which a main thread counts as not coming
_PATIENCE_S = 10.0  # limit for a main thread that computes, or waits outside of Shoal and torch
_BARRIERS = ("barrier", "monitored_barrier")  # functions of torch that end together on all ranks
# digests of a rank that waits elsewhere; with the second one it certainly does not come
_MAYBE_LATER, _AWAY = 0, 1
_LOGGER = logging.getLogger("shoal")


@dataclass(frozen=True)
class _Statement:
    """Statement of a rank in a meeting."""

    number: int = 0
    digest: int = _MAYBE_LATER  # digest of the purpose
    request: PartsRequest = field(default_factory=PartsRequest)
    steps: int = 0  # steps that the main thread has made

    @property
    def trains(self) -> bool:
        """Whether a gradient may come back through the reading of an output."""
        return self.request.wanted == Wanted.OUTPUT and bool(self.request.tally)

    def is_past(self, steps: int) -> bool:
        """Return whether the rank will certainly not come to a reading after so many steps."""
        return self.digest == _AWAY or (self.is_here and self.steps > steps)

    def words(self) -> Tensor:
        request = self.request
        asked = [request.wanted, request.tally, *request.stamp]
        values = [self.number, self.digest, *asked, self.steps]
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    @classmethod
    def read(cls, words: Tensor) -> _Statement:
        number, digest, wanted, tally, first, second, steps = words.tolist()
        return cls(number, digest, PartsRequest(wanted, tally, (first, second)), steps)

    @property
    def is_here(self) -> bool:
        """Whether the rank's main thread is at the meeting."""
        return self.digest not in (_MAYBE_LATER, _AWAY)


@dataclass
class _RankMeeting:
    """Meeting as this rank sees it."""

    own: Sequence[_Statement]  # one for each rank
    output: SharedOutput | None = None  # the output that this rank reads
    values: list[Tensor] = field(default_factory=list)  # its values, if this rank is alone
    heard: list[_Statement] = field(default_factory=list)
    error: ShoalError | None = None
    nbytes: int = 0  # bytes of parts that have come

    @property
    def together(self) -> bool:
        """Whether all ranks have come for the same purpose."""
        digests = {statement.digest for statement in self.heard}
        return len(digests) == 1 and self.heard[0].is_here

    def serves(self, statement: _Statement) -> bool:
        """Return whether the rank with this statement is served as one that is alone."""
        if statement.trains:
            return any(each.is_past(statement.steps) for each in self.heard)
        # a rank that has come for an output, and is a step behind, comes to that step later
        return not any(each.is_here and each.steps < statement.steps for each in self.heard)

    @property
    def is_unlike(self) -> bool:
        """Whether all ranks read one output, and train on it, but each in its own way."""
        requests = [each.request for each in self.heard if each.trains]
        return len(requests) == len(self.heard) and len(set(requests)) == 1


@final
class LaneAttendance(Attendance):
    """Attendance of the ranks that train one model.

    Args:
        parts: this rank's parts of the model.
        comm: a channel for meetings alone.
        device: the model's device, if it computes in streams.
    """

    def __init__(self, parts: SharedParts, comm: Comm, device: torch.device | None = None) -> None:
        self.parts, self.outputs = parts, SharedOutputs()
        self._comm = comm
        self._lane = Lane(comm, "attendance", device)
        self._meeting = threading.Lock()  # held while a meeting begins
        self._held = threading.Lock()  # held while a meeting is held
        self._begun = 0
        self._last: Errand | None = None  # the lane's last meeting
        self._stepping = 0  # number of an optimizer's parts that are in a step
        self._summons = _Summons()
        self._main = threading.get_ident()
        self._has_told = False
        comm.journal.may_attend(self._attend)

    @property
    def steps(self) -> int:
        return self.parts.stamp[0]

    def numbers(
        self, numbers: Sequence[int], purpose: str, wanted: Wanted = Wanted.PARAMETERS
    ) -> list[int] | None:
        self._main = threading.get_ident()
        self.parts.read_states = {}
        if wanted is Wanted.PARAMETERS and self.parts.wholes:
            if self._summons.number <= self._begun:
                return None
            wanted = Wanted.NOTHING
        parts = self.parts.of_kind(wanted)
        missing = self.parts.missing(parts)
        request = PartsRequest(Wanted.NOTHING if missing else wanted, len(parts), self.parts.stamp)
        begin_s = time.monotonic()
        while True:
            meeting = self._state(numbers or [0] * self._comm.size, purpose, request)
            self._met(meeting, purpose)
            if meeting.together:
                self.parts.free()  # there may be more parts by now
                return [statement.number for statement in meeting.heard]
            if missing:
                raise _too_large(self._who, purpose, missing)
            if wanted is Wanted.CHANGING:
                raise _changing(self._who, purpose)
            if meeting.error is not None:
                raise meeting.error
            if meeting.serves(meeting.own[0]):
                break
        self._tell(purpose, meeting.nbytes, time.monotonic() - begin_s)
        return None

    def whole(self, key: Any) -> Tensor:
        read = self.parts.read_states
        whole: Tensor = read[key] if key in read else self.parts.wholes[key]
        return whole

    def state(self, owned: Any) -> Any:
        return self.parts.read_states.pop(owned)

    def keep(self) -> None:
        self.parts.keep()

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self.parts.lock:
            yield
            steps, changes = self.parts.stamp
            self.parts.stamp = steps, changes + 1
            self.parts.free()

    def step_begins(self) -> None:
        self.parts.lock.acquire()
        self._stepping += 1
        self.parts.free()

    def step_ends(self) -> None:
        if not self._stepping:
            return
        self._stepping -= 1
        if not self._stepping:
            self.parts.stamp = self.steps + 1, 0
        self.parts.lock.release()

    def drain(self) -> None:
        """Do nothing: the lane works for other ranks alone."""

    def abandon(self) -> None:
        """Stop serving, because this rank ends with an error."""
        self._end()
        self._lane.abandon()

    def close(self) -> None:
        """End the lane, and close its channel."""
        self._end()
        self._lane.close()

    def _end(self) -> None:
        self._comm.journal.may_attend(None)
        self.parts.close()
        self.outputs.close()

    @property
    def _who(self) -> str:
        return f"rank {self._comm.rank} of {self._comm.size}"

    def output_key(self, layer: str) -> OutputKey:
        return self.outputs.key(layer)

    def share(self, output: SharedOutput) -> None:
        self.outputs.share(output)

    def hold(self, output: SharedOutput) -> None:
        self.outputs.hold(output)

    def drop(self, layer: str) -> None:
        self.outputs.drop(layer)

    def read(
        self, output: SharedOutput, purpose: str, numbers: Sequence[int], *, trains: bool
    ) -> Reading:
        self._main = threading.get_ident()
        request = PartsRequest(Wanted.OUTPUT, int(trains), output.key.words)
        begin_s = time.monotonic()
        while True:
            meeting = self._state(numbers, purpose, request, output)
            (self._meet_here if trains else self._met)(meeting, purpose)
            if meeting.together:
                return Reading(told=[statement.number for statement in meeting.heard])
            if meeting.error is not None:
                raise meeting.error
            if meeting.serves(meeting.own[0]):
                self._tell(purpose, meeting.nbytes, time.monotonic() - begin_s)
                return Reading(values=meeting.values)
            if meeting.is_unlike:
                return Reading()
            limit_s = self._comm.timeout_s
            if limit_s is not None and time.monotonic() - begin_s > limit_s:
                raise _nobody_comes(self._who, purpose, limit_s)

    def _state(
        self,
        numbers: Sequence[int],
        purpose: str,
        request: PartsRequest,
        output: SharedOutput | None = None,
    ) -> _RankMeeting:
        """Return a meeting at which this rank states these numbers."""
        digest = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=7).digest(), "little")
        steps = self.parts.stamp[0]
        own = [_Statement(number, digest, request, steps) for number in numbers]
        return _RankMeeting(own, output)

    def _meet_here(self, meeting: _RankMeeting, purpose: str) -> None:
        """Meet the other ranks on this thread, unless the lane is in a meeting."""
        with self._meeting:
            is_busy = self._last is not None and not self._last.ended.is_set()
            if not is_busy:
                self._begun += 1
                number = self._comm.journal.queued(purpose, self._begun * _STRIDE)
                self._held.acquire()
        if is_busy:
            return self._met(meeting, purpose)
        try:
            self._comm.journal.runs(number, _PURPOSE)
            self._meet(self._comm, meeting)
        finally:
            self._held.release()
        return None

    def _met(self, meeting: _RankMeeting, purpose: str) -> None:
        """Meet the other ranks, over the lane. They are summoned if they do not come at once."""
        with self._meeting:
            errand = self._begin(meeting)
        if not errand.ended.wait(_AT_ONCE_S):
            self._comm.check(purpose, errand.number)
        errand.wait(purpose)
        self._comm.reached(purpose)

    def _begin(self, meeting: _RankMeeting) -> Errand:
        """Let the lane hold a meeting. The caller has the lock."""
        self._begun += 1

        def meet(comm: Comm) -> None:
            with self._held:
                self._meet(comm, meeting)

        self._last = self._lane.run(meet, _PURPOSE, self._begun * _STRIDE)
        return self._last

    def _attend(self, number: int, elsewhere: MainWait) -> None:
        """Note, on any thread, that others wait at a meeting to which this rank has not come.

        Args:
            number: the meeting's number on the channel.
            elsewhere: whether the main thread waits for something else.
        """
        number //= _STRIDE
        with self._meeting:
            if self.parts.closed or number <= self._begun:
                return
            is_blocked, call = elsewhere is MainWait.FOR_READERS, _torch_call(self._main)
            waits = elsewhere is not MainWait.NONE or bool(call)
            if self._summons.is_over(number, waits) or is_blocked:
                is_away = is_blocked or call in _BARRIERS
                statement = _Statement(digest=_AWAY if is_away else _MAYBE_LATER)
                self._begin(_RankMeeting([statement] * self._comm.size))

    def _meet(self, comm: Comm, meeting: _RankMeeting) -> None:
        """Hold a meeting, on the lane."""
        words = [statement.words() for statement in meeting.own]
        heard = [torch.empty_like(own) for own in words]
        comm.all_to_all(heard, words)
        meeting.heard = [_Statement.read(theirs) for theirs in heard]
        if meeting.together:
            return
        for rank, statement in enumerate(meeting.heard):
            try:
                if meeting.serves(statement):
                    self._serve(comm, rank, statement.request, meeting)
            # ranks that give have come to the end of the reading as well
            except RanksDiffer as error:
                meeting.error = error if rank == comm.rank else meeting.error

    def _serve(self, comm: Comm, reader: int, request: PartsRequest, meeting: _RankMeeting) -> None:
        """Receive or send the parts that one rank reads."""
        if request.wanted == Wanted.OWNED:
            meeting.nbytes += self.parts.gather(comm, reader, request)
        elif request.wanted == Wanted.OUTPUT:
            self._serve_output(comm, reader, request, meeting)
        elif request.wanted not in (Wanted.PARAMETERS, Wanted.STATES):
            return
        elif reader == comm.rank:
            meeting.nbytes += self.parts.take(comm, request)
        else:
            self.parts.give(comm, reader, request)

    def _serve_output(
        self, comm: Comm, reader: int, request: PartsRequest, meeting: _RankMeeting
    ) -> None:
        """Receive or send an output that one rank reads."""
        if reader != comm.rank:
            self.outputs.give(comm, reader, request.stamp)
        elif meeting.output is not None:
            meeting.values, nbytes = self.outputs.take(comm, meeting.output)
            meeting.nbytes += nbytes

    def _tell(self, purpose: str, nbytes: int, seconds: float) -> None:
        if self._has_told or not nbytes:
            return
        self._has_told = True
        _LOGGER.warning(
            f"shoal: rank {self._comm.rank} alone came to: {purpose}. The other ranks have parts "
            f"of it, so it took these, {nbytes / 1e6:.3g} MB in {seconds:.2g} s. It keeps "
            "parameters until its next step or training forward. It is quicker if every rank takes "
            "part"
        )


@final
class _Summons:
    """Summons to a meeting, and the time for which this rank has not come to it."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._elsewhere_since: float | None = None

    def is_over(self, number: int, elsewhere: bool) -> bool:
        """Note one more summons. Return whether the main thread counts as not coming."""
        now = time.monotonic()
        if number != self.number:
            self.number, self._since, self._elsewhere_since = number, now, None
        if not elsewhere:
            self._elsewhere_since = None
        elif self._elsewhere_since is None:
            self._elsewhere_since = now
        since = self._elsewhere_since
        return now - self._since > _PATIENCE_S or (since is not None and now - since > _ELSEWHERE_S)


def _torch_call(thread: int) -> str:
    """Return the function of torch.distributed that a thread is in, e.g. a barrier, or ''."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_globals.get("__name__", "").startswith("torch.distributed"):
        return ""
    return frame.f_code.co_name


def _too_large(who: str, purpose: str, missing: str) -> UsageError:
    return UsageError(
        f"one rank alone came to: {purpose}. It needs all of the parameters, which do not fit",
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


def _nobody_comes(who: str, purpose: str, limit_s: float) -> RanksDiffer:
    return RanksDiffer(
        f"one rank alone came to: {purpose}, through which a gradient may come back, and other "
        f"ranks were not seen to wait for it within {limit_s:g} s",
        where=who,
        do="read values alone under torch.no_grad(), or of output.detach()",
    )
