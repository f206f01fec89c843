"""Who lives, how far they are, and who failed first: every rank beats on a store, and one verdict
goes through it.

A broken connection tells that something died, not what: the survivors' own ends break connections
too. So:

1  beat     each rank writes where it is twice a second, on a connection of its own
2  watch    in the same turn it reads the verdict, and the beat of the rank after it:
            silent for 20 s is lost
3  judge    where an exchange failed, it reads all beats: one that stopped for 3 s is lost,
            none lost is a deadline
4  leave    a rank that ends says so: that it is done, or which error ended it
   verdict  whoever finds out first writes it (compare-and-set), all repeat it, and whoever is
            blocked is woken

One thread alone talks to the store, since a store that was stopped answers never; a second one sees
that it got stuck. Costs one small write and two small reads a rank every half second, however many
ranks there are.
"""

from __future__ import annotations

import atexit
import datetime
import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final

import torch.distributed as dist
from torch.distributed import Store

from shoal.contracts.launcher import VERDICT
from shoal.core.errors import DeadlinePassed, PeerLost, ShoalError, WorldError

_BEAT_S = 0.5
_DEAD_S = 3.0  # no beat for as long as this after an exchange failed: lost
# the same when nothing has failed yet: a rank that is stopped, or a host without power
_SILENT_S = 20.0
_FAREWELL_S = 2.0  # how long the rank that holds the store waits for the others to let go of it
_LONGEST = 500  # letters of another error that a verdict repeats
_GONE = (RuntimeError, dist.DistError)  # what a store raises when it is no longer there

# left: the program has ended; quiet: it has heard what it must
BEATING, LEFT, QUIET = "beating", "left", "quiet"


@dataclass(frozen=True)
class Verdict:
    """What befell the job: the same words on every rank."""

    what: str
    rank: int | None  # the rank that failed first, where one did
    got: str = ""
    deadline: bool = False
    left: bool = False  # that rank's program ended by itself

    def error(self, where: str) -> WorldError:
        """The verdict as the error that a rank raises, saying where that rank was."""
        if self.deadline:
            do = "let every rank do the same forward and backward calls, or raise init(timeout_s=…)"
            return DeadlinePassed(self.what, where=where, got=self.got, do=do, rank=self.rank)
        do = "see what that rank printed last; start the job again"
        if self.left:
            do += "; if it had done its work: its loader had fewer batches (shoal.shard gives "
            do += "every rank as many), or other ranks alone call state_dict() or evaluate, "
            do += "where layers are cut"
        return PeerLost(
            f"a peer was lost: {self.what}", where=where, got=self.got, do=do, rank=self.rank
        )


@dataclass
class _Beat:
    """What a rank last wrote of itself, and when this one first saw it."""

    count: int = -1
    at: str = "start"
    host: str = "?"
    waiting: bool = False
    state: str = BEATING
    seen: float = 0.0


@dataclass(frozen=True)
class _Doubt:
    """An exchange failed here, and nobody has said why."""

    reason: str
    timeout_s: float | None  # what passed; None where it broke before
    since: float

    @property
    def patience_s(self) -> float:
        """How long to look for a lost rank. Whose time is over speaks first: giving up, it broke
        the others' links.
        """
        return _DEAD_S + (2 if self.timeout_s is not None else 6) * _BEAT_S


class Channel(Protocol):
    """What carries this rank's messages."""

    def free(self) -> None:
        """Let every thread that is blocked on it fail."""

    def end(self) -> None:
        """End it, with the threads that it has."""


@final
class Heartbeat:
    """This rank's beat, and the reading of the others'.

    Args:
        store: where all ranks meet; a connection of its own is made from it.
        rank: this one.
        hosts: of every rank.
        holder: the rank whose process holds the store, None where a launcher does.
    """

    def __init__(
        self, store: Store, rank: int, hosts: Sequence[str], holder: int | None = None
    ) -> None:
        self.at = "start"
        # by id, the open ones in the order in which they were made
        self.channels: dict[int, Channel] = {}
        self.busy: set[int] = set()  # threads that are inside an exchange
        self._rank, self._size, self._host, self._holder = rank, len(hosts), hosts[rank], holder
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._store.set_timeout(datetime.timedelta(seconds=_SILENT_S))
        self._waiting = False
        self._beats = {r: _Beat(host=host) for r, host in enumerate(hosts) if r != rank}
        self._count = 0
        self._doubt: _Doubt | None = None
        self._verdict: Verdict | None = None
        self._lock = threading.Lock()  # of the two above
        self._concluded = threading.Event()
        self._nudge, self._stopped = threading.Event(), threading.Event()
        self._process = os.getpid()
        self._store_answers = True
        self._write(BEATING)
        self._turn = time.monotonic()  # when the store answered last
        self._server = threading.Thread(target=self._serve, name="shoal-heartbeat", daemon=True)
        self._server.start()
        threading.Thread(target=self._guard, name="shoal-heartbeat-guard", daemon=True).start()
        atexit.register(self._leave_at_exit)

    def reached(self, where: str) -> None:
        """This rank works at `where`."""
        self.at, self._waiting = where, False

    def check(self, where: str = "") -> None:
        """This rank waits at `where`: raise if there is a verdict."""
        self.at, self._waiting = where or self.at, True
        if self._verdict is not None:
            raise self._error(self._verdict)

    def judge(self, reason: str, timeout_s: float | None) -> WorldError:
        """After an exchange broke for `reason`, or did not end in `timeout_s`: the error on which
        all ranks agree.

        Takes about three seconds where nobody has said why.
        """
        self._waiting = True
        with self._lock:
            if self._doubt is None:
                self._doubt = _Doubt(reason, timeout_s, time.monotonic())
        self._nudge.set()
        self._concluded.wait()
        assert self._verdict is not None
        return self._error(self._verdict)

    def leave(self, error: BaseException | None) -> None:
        """Say that this rank ends: done (None), or for an error, which is the verdict if there is
        none yet.
        """
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        self._nudge.set()
        self._server.join(timeout=2 * _BEAT_S)
        if self._store_answers and not self._server.is_alive():
            self._say_goodbye(error)
        # A thread that needs the interpreter while it ends aborts the process ("terminate called
        # …"): here one that comes out of an exchange, and torch.distributed's own, which give back
        # the tensors of the last exchange.
        deadline = time.monotonic() + _FAREWELL_S
        while self.busy and time.monotonic() < deadline:
            self._free()
            time.sleep(0.01)
        while self.channels:
            self.channels.popitem()[1].end()

    def _say_goodbye(self, error: BaseException | None) -> None:
        try:
            if error is not None and self._verdict is None:
                text = str(error)
                if isinstance(error, ShoalError):
                    text = f"{error.what} ({error.got})" if error.got else error.what
                what = (
                    f"rank {self._rank} (host {self._host}) failed: {type(error).__name__}: {text}"
                )
                self._agreed(Verdict(what[:_LONGEST], self._rank))
            self._write(LEFT)
            if self._holder == self._rank:
                self._wait_for_the_others()
        except _GONE:
            return

    def _leave_at_exit(self) -> None:
        # an error that nobody caught, which Python has just printed
        self.leave(getattr(sys, "last_value", None))

    def _wait_for_the_others(self) -> None:
        """The store ends with this process: let them read how this rank left, or they would meet a
        dead connection.
        """
        deadline = time.monotonic() + _FAREWELL_S
        waited_for = set(self._beats) - {self._verdict.rank if self._verdict else None}
        while waited_for and time.monotonic() < deadline:
            waited_for -= {rank for rank in waited_for if self._read(rank).state != BEATING}
            time.sleep(0.02)

    def _serve(self) -> None:
        """The thread that talks to the store: a turn each half second, at once where there is a
        doubt.
        """
        found: Verdict | None = None
        try:
            while found is None and not self._stopped.is_set():
                self._nudge.wait(_BEAT_S / 2 if self._doubt else _BEAT_S)
                self._nudge.clear()
                # this process was stopped, perhaps all of them were
                if time.monotonic() - self._turn > _DEAD_S:
                    self._beats = {rank: _Beat() for rank in self._beats}
                self._turn = time.monotonic()
                self._write(BEATING)
                found = self._published() or self._found()
                if found is None and self._holder_left():
                    break
            if not self._stopped.is_set():
                found = found and self._agreed(found)
                self._write(QUIET)
        except _GONE:
            self._store_answers = False
            found = found or self._without_store("is gone")
        if found is not None:
            self._conclude(found)

    def _guard(self) -> None:
        """The thread that sees when the other one is stuck, because the store's process is stopped
        or its host away.
        """
        turn, ticks = self._turn, 0
        while not (self._stopped.wait(_BEAT_S) or self._concluded.is_set()):
            # not seconds: this process may be stopped
            turn, ticks = self._turn, ticks + 1 if turn == self._turn else 0
            limit_s = 2 * _DEAD_S if self._doubt else _SILENT_S
            if not self._server.is_alive():
                # it let go of a store whose holder has left
                limit_s = 0.0 if self._doubt else math.inf
            if ticks * _BEAT_S > limit_s:
                self._conclude(self._without_store("gives no sign of life"))

    def _conclude(self, verdict: Verdict) -> None:
        with self._lock:
            self._verdict = self._verdict or verdict
        self._concluded.set()
        self._free()

    def _free(self) -> None:
        for channel in list(self.channels.values()):
            channel.free()

    def _found(self) -> Verdict | None:
        doubt = self._doubt
        if not self._beats:
            return None
        if doubt is None:
            return self._lost([(self._rank + 1) % self._size], _SILENT_S, or_left=False)
        lost = self._lost(list(self._beats), _DEAD_S, or_left=True)
        if lost is not None or time.monotonic() < doubt.since + doubt.patience_s:
            return lost
        return (
            self._broken(doubt.reason)
            if doubt.timeout_s is None
            else self._overdue(doubt.timeout_s)
        )

    def _lost(self, ranks: list[int], limit_s: float, or_left: bool) -> Verdict | None:
        for rank in ranks:
            beat = self._read(rank)
            if beat.state == BEATING and self._turn - beat.seen > limit_s:
                what = (
                    f"rank {rank} (host {beat.host}) gives no sign of life, last seen at: {beat.at}"
                )
                return Verdict(what, rank)
            if beat.state == LEFT and or_left:
                what = f"rank {rank} (host {beat.host}) has ended its program, last at: {beat.at}"
                return Verdict(what, rank, left=True)
        return None

    def _overdue(self, timeout_s: float) -> Verdict:
        absent = {rank: beat for rank, beat in self._beats.items() if not beat.waiting}
        absent = absent or {rank: beat for rank, beat in self._beats.items() if beat.at != self.at}
        names = ", ".join(f"rank {rank} (last at: {beat.at})" for rank, beat in absent.items())
        return Verdict(
            f"an exchange did not end within {timeout_s:g} s: rank {self._rank} waited at: "
            f"{self.at}",
            next(iter(absent), None),
            got=f"absent: {names}"
            if names
            else "every rank waits at the same place: the link is slow or stuck",
            deadline=True,
        )

    def _broken(self, reason: str) -> Verdict:
        return Verdict(
            "an exchange broke, though every rank still lives", None, got=reason[:_LONGEST]
        )

    def _holder_left(self) -> bool:
        """Whether the store is about to end with the program of the rank that holds it."""
        return self._holder not in (None, self._rank) and self._read(self._holder).state != BEATING

    def _without_store(self, how: str) -> Verdict:
        if self._holder is None:
            return Verdict(f"the launcher, which holds the store where ranks meet, {how}", None)
        beat = self._beats.get(self._holder, _Beat())
        left = beat.state == LEFT
        how = "has ended its program" if left else how
        return Verdict(
            f"rank {self._holder} (host {beat.host}), which held the store, {how}",
            self._holder,
            left=left,
        )

    def _error(self, verdict: Verdict) -> WorldError:
        return verdict.error(f"rank {self._rank} at {self.at}")

    def _write(self, state: str) -> None:
        self._count += 1
        mine = {
            "count": self._count,
            "at": self.at,
            "host": self._host,
            "waiting": self._waiting,
            "state": state,
        }
        self._store.set(f"beat/{self._rank}", json.dumps(mine))

    def _read(self, rank: int) -> _Beat:
        """The last beat of a rank."""
        words: dict[str, Any] = {"host": self._beats[rank].host}
        if self._store.check([f"beat/{rank}"]):
            words = json.loads(self._store.get(f"beat/{rank}"))
        if not self._beats[rank].seen or self._beats[rank].count != words.get("count", -1):
            self._beats[rank] = _Beat(**words, seen=self._turn)
        return self._beats[rank]

    def _published(self) -> Verdict | None:
        return (
            Verdict(**json.loads(self._store.get(VERDICT)))
            if self._store.check([VERDICT])
            else None
        )

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Write the verdict if it is the first; the one that stands."""
        return Verdict(
            **json.loads(self._store.compare_set(VERDICT, "", json.dumps(asdict(verdict))))
        )
