"""Attendance over a lane: ranks meet before a call that all make, and serve one that is alone.

    rank 0                           rank 1, which waits in the next forward
    reads a weight, is alone
    states "reading"  ────────────▶  is summoned (comm/places.py)
               ◀───────────────────  its lane states for it: "elsewhere"
    takes the parts  ◀─────────────  its lane sends them (shared_parts.py)
    works on the whole, frees it

A meeting is one exchange of statements. Every rank is in every meeting, by its main thread or by
its lane, so all know the same of it. If all have come for the same purpose, they go on together. If
not, the parts go to each rank that wants them, in the same meeting. A lane states for its rank as
soon as the main thread waits elsewhere: in an exchange of Shoal, in torch.distributed, or at the
end of the program.

Costs nothing in training. A call of all ranks costs as much as `Comm.numbers`, and a switch of
threads. A rank that is alone waits about a second for the others' lanes. Guarded by tests/alone/.
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

from shoal.contracts.attendance import Attendance, Wanted
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, ShoalError, UsageError
from shoal.engine.lanes import Errand, Lane
from shoal.engine.shared_parts import PartsRequest, SharedParts

_PURPOSE = "attendance"
_STRIDE = 1 << 20  # numbers of the channel that belong to one meeting
_AT_ONCE_S = 0.02  # limit of a meeting to which all ranks come at once
_ELSEWHERE_S = 0.4  # a main thread that waits elsewhere for so long is taken not to come
_PATIENCE_S = 10.0  # limit for one that computes, or waits outside of Shoal and torch
_LOGGER = logging.getLogger("shoal")


@dataclass(frozen=True)
class _Statement:
    """The statement of a rank in a meeting."""

    number: int = 0
    digest: int = 0  # digest of the purpose; 0: elsewhere
    request: PartsRequest = field(default_factory=PartsRequest)

    def words(self) -> Tensor:
        request = self.request
        values = [self.number, self.digest, request.wanted, request.tally, *request.stamp]
        return torch.tensor(values, dtype=torch.int64, device="cpu")

    @classmethod
    def read(cls, words: Tensor) -> _Statement:
        number, digest, wanted, tally, steps, changes = words.tolist()
        return cls(number, digest, PartsRequest(wanted, tally, (steps, changes)))


@dataclass
class _RankMeeting:
    """One meeting, as this rank sees it."""

    own: Sequence[_Statement]  # one for each rank
    heard: list[_Statement] = field(default_factory=list)
    error: ShoalError | None = None
    nbytes: int = 0  # bytes of parts that have come

    @property
    def together(self) -> bool:
        """Whether all ranks have come for the same purpose."""
        digests = {statement.digest for statement in self.heard}
        return len(digests) == 1 and 0 not in digests


@final
class LaneAttendance(Attendance):
    """The attendance of the ranks that train one model.

    Args:
        parts: this rank's parts of it.
        comm: a channel of its own.
        device: where the model is, if that computes in streams.
    """

    def __init__(self, parts: SharedParts, comm: Comm, device: torch.device | None = None) -> None:
        self.parts = parts
        self._comm = comm
        self._lane = Lane(comm, "attendance", device)
        self._meeting = threading.Lock()  # held while a meeting begins
        self._begun = 0
        self._stepping = 0  # parts of an optimizer that are in a step
        self._summons = _Summons()
        self._main = threading.get_ident()
        self._has_told = False
        comm.may_attend(self._attend)

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
        meeting = self._met(numbers or [0] * self._comm.size, purpose, request)
        if meeting.together:
            self.parts.free()  # parts may have become more since
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
        """Serve no more: this rank ends for an error."""
        self._end()
        self._lane.abandon()

    def close(self) -> None:
        """End the lane, and give back its channel."""
        self._end()
        self._lane.close()

    def _end(self) -> None:
        self._comm.may_attend(None)
        self.parts.close()

    @property
    def _who(self) -> str:
        return f"rank {self._comm.rank} of {self._comm.size}"

    def _met(self, numbers: Sequence[int], purpose: str, request: PartsRequest) -> _RankMeeting:
        """Meet the other ranks. They are summoned if they do not come at once."""
        digest = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=7).digest(), "little")
        meeting = _RankMeeting([_Statement(number, digest, request) for number in numbers])
        with self._meeting:
            errand = self._begin(meeting)
        if not errand.ended.wait(_AT_ONCE_S):
            self._comm.check(purpose, errand.number)
        errand.wait(purpose)
        self._comm.reached(purpose)
        return meeting

    def _begin(self, meeting: _RankMeeting) -> Errand:
        """Have the lane hold a meeting. The caller has the lock."""
        self._begun += 1
        number = self._begun * _STRIDE
        return self._lane.run(lambda comm: self._meet(comm, meeting), _PURPOSE, number)

    def _attend(self, number: int, waits: bool) -> None:
        """Hear that others wait at a meeting to which this rank has not come, on any thread.

        Args:
            number: of the channel.
            waits: whether the main thread waits for something else.
        """
        number //= _STRIDE
        with self._meeting:
            if self.parts.closed or number <= self._begun:
                return
            if self._summons.is_over(number, waits or _is_in_torch(self._main)):
                self._begin(_RankMeeting([_Statement()] * self._comm.size))

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
                self._serve(comm, rank, statement.request, meeting)
            except RanksDiffer as error:  # ranks that give have come to the end of it as well
                meeting.error = error if rank == comm.rank else meeting.error

    def _serve(self, comm: Comm, reader: int, request: PartsRequest, meeting: _RankMeeting) -> None:
        """Take or give the parts that one rank reads."""
        if request.wanted == Wanted.OWNED:
            meeting.nbytes += self.parts.gather(comm, reader, request)
        elif request.wanted not in (Wanted.PARAMETERS, Wanted.STATES):
            return
        elif reader == comm.rank:
            meeting.nbytes += self.parts.take(comm, request)
        else:
            self.parts.give(comm, reader, request)

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


def _is_in_torch(thread: int) -> bool:
    """Return whether a thread is inside a call of torch.distributed, such as a barrier."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch.distributed")


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
