"""Who lives, how far they are, and who failed first: ranks beat on a store, with one verdict.

A broken connection tells that something died, not what: the survivors' own ends break connections
too. So:

1  beat     each rank writes where it is twice a second, on a connection of its own
2  watch    in the same turn it reads the verdict, and the beat of the rank after it that has
            not ended; a rank that is silent for 20 s is lost, or for 3 s if its process has ended
3  judge    where an exchange failed, it reads all beats; one that stopped for 3 s is lost,
            and if none is lost a deadline has passed
4  leave    a rank that ends says so: that it is done, or which error ended it
   verdict  whoever finds out first writes it (compare-and-set), all repeat it,
            and whoever is blocked is woken

One thread alone talks to the store (beats.py), since a store that was stopped answers never. A
second one sees that it got stuck.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch.distributed as dist

from shoal.comm.aside import may_block
from shoal.comm.beats import BEATING, LEFT, QUIET, Beat, BeatBoard, Verdict
from shoal.comm.lookout import Lookout
from shoal.comm.patience import USUAL, Patience
from shoal.comm.places import ChannelRecord, Journal
from shoal.comm.pulse import Pulses
from shoal.comm.rendezvous import blame
from shoal.comm.signed_store import SignedStore
from shoal.contracts.store_values import Values
from shoal.core.errors import RanksDiffer, ShoalError, WorldError
from shoal.core.facts import Topology
from shoal.core.side_threads import is_side_thread

_BEAT_S = 0.5
_DEAD_S = 3.0  # no beat for as long as this after an exchange failed: lost
# the same when nothing has failed yet: a rank that is stopped, or a host without power
_SILENT_S = 20.0
# the least that can be asked for: six beats in a row must be missing, since threads that share a
# processor, and the store, are late by one or two
LEAST_LOST_S = 6 * _BEAT_S
_ABSENT_S = 6.0  # the same for a rank that is awaited, to make connections
_FAREWELL_S = 2.0  # how long the rank that holds the store waits for the others to let go of it
_EXPLAINED_S = 1.5  # how long who has noticed that ranks differ waits for what each is at
_UNTOLD_S = 5.0  # how long a verdict may stay untold until a line of the log tells it
_LONGEST = 500  # letters of another error that a verdict repeats
_LOGGER = logging.getLogger("shoal")
_GONE = (RuntimeError, dist.DistError)  # what a store raises when it is no longer there


@dataclass(frozen=True)
class _Doubt:
    """An exchange that failed here, and nobody has said why."""

    reason: str
    timeout_s: float | None  # what passed; None where it broke before
    since: float
    differ: bool = False  # ranks were seen to be at different things

    @property
    def patience_s(self) -> float:
        """How long to look for a lost rank. Whose time is over speaks first: giving up, it broke
        the others' links.
        """
        return _DEAD_S + (2 if self.timeout_s is not None else 6) * _BEAT_S


@final
class _Case:
    """The case of this job's failure: this rank's doubt, and the verdict that closes it."""

    def __init__(self) -> None:
        self.doubt: _Doubt | None = None
        self.verdict: Verdict | None = None
        self.closed = threading.Event()
        self._lock = threading.Lock()  # of doubt and verdict

    def open(self, reason: str, timeout_s: float | None, *, differ: bool = False) -> None:
        """Doubt, unless this rank does already."""
        with self._lock:
            if self.doubt is None:
                self.doubt = _Doubt(reason, timeout_s, time.monotonic(), differ)

    def close(self, verdict: Verdict) -> None:
        """Keep the first verdict, and wake who waits for one."""
        with self._lock:
            self.verdict = self.verdict or verdict
        self.closed.set()


@dataclass(frozen=True)
class StoreHolder:
    """The process that holds the store: the store ends with it."""

    rank: int | None = None  # None: a launcher
    # ranks that go with it: those of its host, where a launcher ends when one of them does
    beside: tuple[int, ...] = ()


class OpenChannel(Protocol):
    """A channel that carries this rank's messages."""

    def free(self) -> None:
        """Let every thread that is blocked on it fail."""

    def end(self) -> None:
        """End it, with the threads that it has."""


@final
class _Judge:
    """One rank's judge: it finds the verdict in the beats of all.

    Args:
        board: the beats.
        lookout: sees whether ranks wait in vain.
        holder: of the store.
        silent_s: seconds without any sign of life after which a rank is lost.
    """

    def __init__(
        self, board: BeatBoard, lookout: Lookout, holder: StoreHolder, silent_s: float
    ) -> None:
        self._board, self.holder, self.silent_s = board, holder, silent_s
        self._lookout = lookout
        self.awaited: frozenset[int] = frozenset()  # ranks that this one makes something with

    def found(self, doubt: _Doubt | None) -> Verdict | None:
        """The verdict, if there is one yet."""
        board = self._board
        if not board.beats:
            return None
        if doubt is None and self.awaited:
            return board.lost(sorted(self.awaited), _ABSENT_S, or_left=True)
        if doubt is None:
            found, next_one = self._lookout.look(), board.next_one()
            found = found or board.ended(next_one, min(_DEAD_S, self.silent_s))
            return found or board.lost(next_one, self.silent_s, or_left=False)
        differing = self._lookout.differing()
        if differing is not None or doubt.differ:
            is_late = time.monotonic() > doubt.since + _BEAT_S
            return differing or (Verdict(doubt.reason, None, differ=True) if is_late else None)
        # one that has ended may have done its work: only if no other can have died meanwhile
        or_left = board.all_beat_since(doubt.since + _BEAT_S)
        lost = board.lost(list(board.beats), _DEAD_S, or_left=or_left)
        if lost is not None or time.monotonic() < doubt.since + doubt.patience_s:
            return lost
        return board.lost(list(board.beats), _DEAD_S, or_left=True, or_unread=True) or (
            self._broken(doubt.reason)
            if doubt.timeout_s is None
            else self._overdue(doubt.timeout_s)
        )

    def _overdue(self, timeout_s: float) -> Verdict:
        rank, at, beats = self._board.rank, self._board.at, self._board.beats
        absent = {other: beat for other, beat in beats.items() if not beat.waiting}
        absent = absent or {other: beat for other, beat in beats.items() if beat.at != at}
        names = ", ".join(f"rank {other} (last at: {beat.at})" for other, beat in absent.items())
        return Verdict(
            f"an exchange did not end within {timeout_s:g} s: rank {rank} waited at: {at}",
            next(iter(absent), None),
            got=f"absent: {names}"
            if names
            else "every rank waits at the same place: the link is slow or stuck",
            deadline=True,
        )

    def _broken(self, reason: str) -> Verdict:
        what = "an exchange broke, though every rank still lives"
        return Verdict(what, None, got=reason[:_LONGEST], broke=True)

    def holder_left(self) -> bool:
        """Whether the store is about to end with the program of the rank that holds it."""
        holder = self.holder.rank
        return (
            holder is not None
            and holder != self._board.rank
            and self._board.read(holder).state != BEATING
        )

    def without_store(self, how: str) -> Verdict:
        """The verdict that the store is lost, and in which way."""
        holder, beside = self.holder.rank, self.holder.beside
        if holder is None and beside and self._board.rank not in beside:
            # kill -9 of a rank ends its launcher within a blink, before its beats are missed
            names = ", ".join(f"rank {rank}" for rank in beside)
            host = self._board.beats[beside[0]].host
            return Verdict(
                f"{names} (host {host}) {how}, with the launcher there, which held the store",
                beside[0],
            )
        if holder is None:
            return Verdict(f"the launcher, which holds the store where ranks meet, {how}", None)
        beat = self._board.beats.get(holder, Beat())
        left = beat.state == LEFT
        how = "has ended its program" if left else how
        return Verdict(
            f"rank {holder} (host {beat.host}), which held the store, {how}",
            holder,
            left=left,
        )


@final
class Heartbeat:
    """This rank's beat, and the reading of the others'.

    Args:
        values: in the store where all ranks meet; it makes a connection of its own to that.
        rank: this one.
        topology: the hosts of all ranks, and how many of them train, the first.
        holder: of the store.
        pulses: of all ranks, and this one's own.
        lost_after_s: seconds without any sign of life after which a rank is lost.
        patience: how long ranks that live are waited for.
    """

    def __init__(
        self,
        values: Values,
        rank: int,
        topology: Topology,
        holder: StoreHolder = StoreHolder(),
        pulses: Pulses | None = None,
        lost_after_s: float | None = None,
        patience: Patience = USUAL,
    ) -> None:
        # by id, the open ones in the order in which they were made
        self.channels: dict[int, OpenChannel] = {}
        self.busy: set[int] = set()  # threads that are inside an exchange
        # of the groups: torch keeps only the half of it that is C++
        self.store: SignedStore | None = None
        self.workers = topology.workers or topology.size
        self._board = BeatBoard(values, rank, topology.hosts, Journal(), pulses or Pulses())
        silent_s = _SILENT_S if lost_after_s is None else lost_after_s
        lookout = Lookout(self._board, self.workers, patience)
        self._judge = _Judge(self._board, lookout, holder, silent_s)
        self._case = _Case()
        self._nudge, self._stopped = threading.Event(), threading.Event()
        self._told = threading.Event()  # the program was told of the verdict
        self._process = os.getpid()
        self._store_answers = True
        self._board.turn = time.monotonic()
        self._nudge.set()  # the first beat goes at once
        self._server = threading.Thread(target=self._serve, name="shoal-heartbeat", daemon=True)
        self._server.start()
        self._guarding = threading.Thread(
            target=self._guard, name="shoal-heartbeat-guard", daemon=True
        )
        self._guarding.start()
        atexit.register(self._leave_at_exit)

    @property
    def journal(self) -> Journal:
        """What this rank does."""
        return self._board.journal

    @property
    def at(self) -> str:
        """Where this rank works or waits."""
        return self._board.at

    @property
    def who(self) -> str:
        """This rank and its host."""
        return f"rank {self._board.rank}, host {self._board.host}"

    @contextmanager
    def awaiting(self, ranks: Iterable[int]) -> Iterator[None]:
        """While these ranks make something together, look at the beats of all of them.

        No exchange breaks where one dies meanwhile.
        """
        self._judge.awaited = frozenset(ranks) - {self._board.rank}
        try:
            yield
        finally:
            self._judge.awaited = frozenset()

    def reached(self, where: str) -> None:
        """This rank works at `where`."""
        if is_side_thread():
            return
        self._board.at, self._board.waiting = where, False
        self.journal.wait = None

    def check(
        self, where: str = "", record: ChannelRecord | None = None, number: int | None = None
    ) -> None:
        """This rank waits at `where`, for that number of a channel: raise if there is a verdict."""
        if not is_side_thread():
            self._board.at, self._board.waiting = where or self.at, True
            if record is not None:
                self.journal.waits(record, number, self.at)
                if record.attend is not None:
                    self._nudge.set()  # the others are summoned at once
                if self.journal.asked:
                    self.journal.answer()
        if self._case.verdict is not None:
            raise self._error(self._case.verdict)

    def hear(self, *, again: bool = True) -> None:
        """Raise the verdict if there is one; unless `again`, only if nobody was told of it yet."""
        verdict = self._case.verdict
        if verdict is not None and (again or not self._told.is_set()):
            raise self._error(verdict)

    def has_told(self) -> None:
        """The program is about to be told of the verdict, or that this rank ends."""
        if not may_block():
            self._told.set()

    def judge(self, reason: str, timeout_s: float | None) -> WorldError | RanksDiffer:
        """The error on which ranks agree after an exchange broke, or did not end in `timeout_s`.

        Takes about three seconds where nobody has said why.
        """
        self._board.waiting = True
        self._case.open(reason, timeout_s)
        self._nudge.set()
        while not self._case.closed.wait(_DEAD_S):
            if self._stopped.is_set():  # nobody looks any more
                self._conclude(Verdict("this rank has left the others", self._board.rank))
        assert self._case.verdict is not None
        return self._error(self._case.verdict)

    def explained(self, error: ShoalError) -> ShoalError:
        """The verdict on which ranks agree, where one has noticed that they differ."""
        self._case.open(error.what, None, differ=True)
        self._nudge.set()
        self._case.closed.wait(_EXPLAINED_S)
        return error if self._case.verdict is None else self._error(self._case.verdict)

    def leave(self, error: BaseException | None) -> None:
        """Say that this rank ends: done (None), or for an error, the verdict if there is none."""
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        self._told.set()
        self._nudge.set()
        for thread in (self._server, self._guarding):  # they may be freeing channels
            thread.join(timeout=2 * _BEAT_S)
        if self._store_answers and not self._server.is_alive():
            self._say_goodbye(error)
        # A thread that needs the interpreter while it ends aborts the process ("terminate called
        # …"): here one that comes out of an exchange, and torch.distributed's own, which give back
        # the tensors of the last exchange.
        self._board.pulses.end()
        deadline = time.monotonic() + _FAREWELL_S
        while self.busy and time.monotonic() < deadline:
            self._free()
            time.sleep(0.01)
        while self.channels:
            self.channels.popitem()[1].end()

    def _say_goodbye(self, error: BaseException | None) -> None:
        try:
            if error is not None and self._case.verdict is None:
                text = str(error)
                if isinstance(error, ShoalError):
                    text = f"{error.what} ({error.got})" if error.got else error.what
                who = f"rank {self._board.rank} (host {self._board.host})"
                problem = f"{who} failed: {type(error).__name__}: {text}"
                self._board.agreed(Verdict(problem[:_LONGEST], self._board.rank))
            elif self._case.verdict is not None:
                self._board.agreed(self._case.verdict)  # where a stranger has written over it
            self._board.write(LEFT)
            self._board.repeat(_FAREWELL_S)
            own, holder = self._board.rank, self._judge.holder
            # where the launcher that has the store ends behind this rank, others must hear why now
            if holder.rank == own or (error is not None and own in holder.beside):
                self._wait_for_the_others()
        except _GONE:
            return

    def _leave_at_exit(self) -> None:
        # an error that nobody caught, which Python has just printed
        self.leave(getattr(sys, "last_value", None))

    def _wait_for_the_others(self) -> None:
        """Wait for other ranks to read how this one left: the store is about to end."""
        deadline = time.monotonic() + _FAREWELL_S
        verdict = self._case.verdict
        waited_for = set(self._board.beats) - {verdict.rank if verdict else None}
        while waited_for and time.monotonic() < deadline:
            waited_for -= {rank for rank in waited_for if self._board.read(rank).state != BEATING}
            time.sleep(0.02)

    def _serve(self) -> None:
        """The thread that talks to the store: twice a second, at once if there is a doubt."""
        found: Verdict | None = None
        try:
            self._board.connect(self._judge.silent_s)
            while found is None and not self._stopped.is_set():
                self._nudge.wait(_BEAT_S / 2 if self._case.doubt or self.journal.wait else _BEAT_S)
                self._nudge.clear()
                # this process was stopped, perhaps all of them were
                if time.monotonic() - self._board.turn > _DEAD_S:
                    self._board.forget()
                self._board.turn = time.monotonic()
                self._board.write(BEATING)
                self._board.meet_pulses()
                self._board.summon()
                found = self._board.published() or self._judge.found(self._case.doubt)
                if found is None and self._judge.holder_left():
                    break
            if not self._stopped.is_set():
                found = found and self._board.agreed(found)
                self._board.write(QUIET)
        except _GONE:
            self._store_answers = False
            found = found or self._judge.without_store("is gone")
        if found is not None:
            self._conclude(found)
            self._tell_of(found)

    def _guard(self) -> None:
        """The thread that sees when the other one is stuck: the store is stopped, or away."""
        turn, ticks = self._board.turn, 0
        while not (self._stopped.wait(_BEAT_S) or self._case.closed.is_set()):
            # not seconds: this process may be stopped
            turn, ticks = self._board.turn, ticks + 1 if turn == self._board.turn else 0
            limit_s = 2 * _DEAD_S if self._case.doubt else self._judge.silent_s
            if not self._server.is_alive():
                # it let go of a store whose holder has left
                limit_s = 0.0 if self._case.doubt else math.inf
            holder = self._judge.holder.rank
            if ticks * _BEAT_S > limit_s and holder is not None and self._server.is_alive():
                ticks = 0 if self._board.pulses.lives(holder) else ticks
            if ticks * _BEAT_S > limit_s:
                found = self._judge.without_store("gives no sign of life")
                self._conclude(found)
                self._tell_of(found)

    def _conclude(self, verdict: Verdict) -> None:
        self._case.close(verdict)
        blame(verdict.rank)
        self._free()

    def _tell_of(self, verdict: Verdict) -> None:
        """Log a verdict that the program does not hear: it waits for nobody, and is in no step."""
        if not self._told.wait(_UNTOLD_S):
            _LOGGER.warning(
                f"shoal: {self._error(verdict).what}. This rank ends at its next batch or step"
            )

    def _free(self) -> None:
        for channel in list(self.channels.values()):
            channel.free()

    def _error(self, verdict: Verdict) -> WorldError | RanksDiffer:
        self.has_told()
        return verdict.error(f"rank {self._board.rank} at {self.at}")
