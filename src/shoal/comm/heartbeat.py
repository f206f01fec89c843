"""Heartbeat: ranks beat on a store, and agree on one verdict about the rank that failed first.

A broken connection shows that something died, but not which rank: survivors that end break
connections, too. So:

1  beat     each rank writes its place twice a second, on a connection of its own
2  watch    in the same turn it reads the verdict, and the beat of the rank after it that has
            not ended; a rank that is silent for 20 s is lost, or for 3 s if its process has ended
3  judge    if an exchange failed, it reads all beats; a rank without a beat for 3 s is lost,
            and if none is lost a deadline has passed
4  leave    a rank that ends says so: that it is done, or the error that ended it
   verdict  the rank that finds out first writes it (compare-and-set), all repeat it,
            and every blocked thread is woken

Only one thread talks to the store (beats.py), because a store that was stopped never answers. A
second thread sees when the first is stuck.
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

from shoal.comm.beats import BEATING, LEFT, QUIET, Beat, BeatBoard, Verdict
from shoal.comm.blocking_calls import may_block
from shoal.comm.lookout import Lookout
from shoal.comm.patience import USUAL, Patience
from shoal.comm.pulse import Pulses
from shoal.comm.rendezvous import blame
from shoal.comm.signed_store import SignedStore
from shoal.comm.wait_places import ChannelRecord, Journal
from shoal.contracts.store_values import Values
from shoal.core.errors import RanksDiffer, ShoalError, WorldError
from shoal.core.facts import Topology
from shoal.core.side_threads import is_side_thread

_BEAT_S = 0.5
_DEAD_S = 3.0  # seconds without a beat after an exchange failed, until a rank is lost
# the same if nothing has failed yet: a rank may be stopped, or a host without power
_SILENT_S = 20.0
# least value that the user may set: six beats in a row must be missing, because threads that share
# a processor, and the store, may be late by one or two
LEAST_LOST_S = 6 * _BEAT_S
_ABSENT_S = 6.0  # the same for a rank that takes part in making connections
_FAREWELL_S = 2.0  # seconds that the rank with the store waits for the others to let go of it
_EXPLAINED_S = 1.5  # seconds that a rank which has noticed a difference waits for the places of all
_UNTOLD_S = 5.0  # seconds until a line of the log reports a verdict that the program has not heard
_LONGEST = 500  # letters of another error that a verdict repeats
_LOGGER = logging.getLogger("shoal")
_GONE = (RuntimeError, dist.DistError)  # errors of a store that is no longer there


@dataclass(frozen=True)
class _Doubt:
    """Failed exchange on this rank, without an explanation yet."""

    reason: str
    timeout_s: float | None  # the limit that passed; None if the exchange broke before
    since: float
    differ: bool = False  # ranks were seen at different places

    @property
    def patience_s(self) -> float:
        """Seconds to look for a lost rank. A rank with a passed limit speaks first: by giving up,
        it broke the others' links.
        """
        return _DEAD_S + (2 if self.timeout_s is not None else 6) * _BEAT_S


@final
class _Case:
    """Case of this job's failure: this rank's doubt, and the verdict that closes it."""

    def __init__(self) -> None:
        self.doubt: _Doubt | None = None
        self.verdict: Verdict | None = None
        self.closed = threading.Event()
        self._lock = threading.Lock()  # guards doubt and verdict

    def open(self, reason: str, timeout_s: float | None, *, differ: bool = False) -> None:
        """Open a doubt, unless this rank has one already."""
        with self._lock:
            if self.doubt is None:
                self.doubt = _Doubt(reason, timeout_s, time.monotonic(), differ)

    def close(self, verdict: Verdict) -> None:
        """Keep the first verdict, and wake the threads that wait for one."""
        with self._lock:
            self.verdict = self.verdict or verdict
        self.closed.set()


@dataclass(frozen=True)
class StoreHolder:
    """Process that holds the store: the store ends with it."""

    rank: int | None = None  # None: a launcher
    # ranks that end with it: all of its host, if a launcher ends when one of them does
    beside: tuple[int, ...] = ()


class OpenChannel(Protocol):
    """Channel that carries this rank's messages."""

    def free(self) -> None:
        """Make every thread that is blocked on it fail."""

    def end(self) -> None:
        """End it, with its threads."""


@final
class _Judge:
    """Judge of one rank: it finds the verdict in the beats of all.

    Args:
        board: the beats.
        lookout: sees whether ranks wait in vain.
        holder: the store's holder.
        silent_s: seconds without any sign of life after which a rank is lost.
    """

    def __init__(
        self, board: BeatBoard, lookout: Lookout, holder: StoreHolder, silent_s: float
    ) -> None:
        self._board, self.holder, self.silent_s = board, holder, silent_s
        self._lookout = lookout
        self.awaited: frozenset[int] = frozenset()  # ranks that make a group together with this one

    def found(self, doubt: _Doubt | None) -> Verdict | None:
        """Return the verdict, if there is one yet."""
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
        # a rank that has ended may have done its work: it counts only if no other can have died
        # meanwhile
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
        """Return whether the store is about to end with the program of the rank that holds it."""
        holder = self.holder.rank
        return (
            holder is not None
            and holder != self._board.rank
            and self._board.read(holder).state != BEATING
        )

    def without_store(self, how: str) -> Verdict:
        """Return the verdict that the store is lost, with the way in which it ended."""
        holder, beside = self.holder.rank, self.holder.beside
        if holder is None and beside and self._board.rank not in beside:
            # kill -9 of a rank ends its launcher within moments, before its beats are missed
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
    """Beat of this rank, and its reading of the other beats.

    Args:
        values: values in the store where all ranks meet. The heartbeat opens its own connection.
        rank: this rank.
        topology: the hosts of all ranks, and the number of the first ranks, which train.
        holder: the store's holder.
        pulses: pulses of all ranks, and this one's own.
        lost_after_s: seconds without any sign of life after which a rank is lost.
        patience: the time to wait for ranks that live.
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
        # open channels by id, in the order in which they were made
        self.channels: dict[int, OpenChannel] = {}
        self.busy: set[int] = set()  # threads that are inside an exchange
        # store of the groups, kept here because torch keeps only its C++ half
        self.store: SignedStore | None = None
        self.workers = topology.workers or topology.size
        self._board = BeatBoard(values, rank, topology.hosts, Journal(), pulses or Pulses())
        silent_s = _SILENT_S if lost_after_s is None else lost_after_s
        lookout = Lookout(self._board, self.workers, patience)
        self._judge = _Judge(self._board, lookout, holder, silent_s)
        self._case = _Case()
        self._nudge, self._stopped = threading.Event(), threading.Event()
        self._told = threading.Event()  # set once the program was told of the verdict
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
        """Journal of this rank."""
        return self._board.journal

    @property
    def at(self) -> str:
        """Place where this rank works or waits."""
        return self._board.at

    @property
    def who(self) -> str:
        """This rank and its host."""
        return f"rank {self._board.rank}, host {self._board.host}"

    @contextmanager
    def awaiting(self, ranks: Iterable[int]) -> Iterator[None]:
        """Watch the beats of all these ranks while they make something together.

        No exchange breaks if one of them dies meanwhile.
        """
        self._judge.awaited = frozenset(ranks) - {self._board.rank}
        try:
            yield
        finally:
            self._judge.awaited = frozenset()

    def reached(self, where: str) -> None:
        """Note that this rank works at `where`."""
        if is_side_thread():
            return
        self._board.at, self._board.waiting = where, False
        self.journal.wait = None

    def check(
        self, where: str = "", record: ChannelRecord | None = None, number: int | None = None
    ) -> None:
        """Note that this rank waits at `where`, for that number of a channel. Raise the verdict if
        there is one.
        """
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
        """Raise the verdict if there is one. Unless `again`, raise it only if the program was not
        told yet.
        """
        verdict = self._case.verdict
        if verdict is not None and (again or not self._told.is_set()):
            raise self._error(verdict)

    def has_told(self) -> None:
        """Note that the program is about to hear the verdict, or that this rank ends."""
        if not may_block():
            self._told.set()

    def judge(self, reason: str, timeout_s: float | None) -> WorldError | RanksDiffer:
        """Return the error on which ranks agree after an exchange broke, or did not end in
        `timeout_s`.

        This takes about three seconds if no rank has reported the reason.
        """
        self._board.waiting = True
        self._case.open(reason, timeout_s)
        self._nudge.set()
        while not self._case.closed.wait(_DEAD_S):
            if self._stopped.is_set():  # the thread that looks has ended
                self._conclude(Verdict("this rank has left the others", self._board.rank))
        assert self._case.verdict is not None
        return self._error(self._case.verdict)

    def explain(self, error: ShoalError) -> ShoalError:
        """Return the verdict on which ranks agree, if one has noticed that they differ."""
        self._case.open(error.what, None, differ=True)
        self._nudge.set()
        self._case.closed.wait(_EXPLAINED_S)
        return error if self._case.verdict is None else self._error(self._case.verdict)

    def leave(self, error: BaseException | None) -> None:
        """Report that this rank ends: done (None), or with an error, the verdict if there is none
        yet.
        """
        if self._stopped.is_set() or os.getpid() != self._process:
            return
        self._stopped.set()
        self._told.set()
        self._nudge.set()
        for thread in (self._server, self._guarding):  # they may be freeing channels
            thread.join(timeout=2 * _BEAT_S)
        if self._store_answers and not self._server.is_alive():
            self._say_goodbye(error)
        # If a thread needs the interpreter while it ends, it aborts the process ("terminate called
        # …"). Here these are threads that leave an exchange, and torch.distributed's own, which
        # release the tensors of the last exchange.
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
                self._board.agree(Verdict(problem[:_LONGEST], self._board.rank))
            elif self._case.verdict is not None:
                # written again, because a stranger may have overwritten it
                self._board.agree(self._case.verdict)
            self._board.write(LEFT)
            self._board.repeat(_FAREWELL_S)
            own, holder = self._board.rank, self._judge.holder
            # if the launcher with the store ends after this rank, the others must hear the reason
            # now
            if holder.rank == own or (error is not None and own in holder.beside):
                self._wait_for_the_others()
        except _GONE:
            return

    def _leave_at_exit(self) -> None:
        # an uncaught error, which Python has just printed
        self.leave(getattr(sys, "last_value", None))

    def _wait_for_the_others(self) -> None:
        """Wait until the other ranks have read how this one left, because the store is about to
        end.
        """
        deadline = time.monotonic() + _FAREWELL_S
        verdict = self._case.verdict
        waited_for = set(self._board.beats) - {verdict.rank if verdict else None}
        while waited_for and time.monotonic() < deadline:
            waited_for -= {rank for rank in waited_for if self._board.read(rank).state != BEATING}
            time.sleep(0.02)

    def _serve(self) -> None:
        """Talk to the store, on a thread: twice a second, and at once if there is a doubt."""
        found: Verdict | None = None
        try:
            self._board.connect(self._judge.silent_s)
            while found is None and not self._stopped.is_set():
                self._nudge.wait(_BEAT_S / 2 if self._case.doubt or self.journal.wait else _BEAT_S)
                self._nudge.clear()
                # this process was stopped, and perhaps all of them were
                if time.monotonic() - self._board.turn > _DEAD_S:
                    self._board.forget()
                self._board.turn = time.monotonic()
                self._board.write(BEATING)
                self._board.meet_pulses()
                self._board.summon()
                found = self._board.published_verdict() or self._judge.found(self._case.doubt)
                if found is None and self._judge.holder_left():
                    break
            if not self._stopped.is_set():
                found = found and self._board.agree(found)
                self._board.write(QUIET)
        except _GONE:
            self._store_answers = False
            found = found or self._judge.without_store("is gone")
        if found is not None:
            self._conclude(found)
            self._tell_of(found)

    def _guard(self) -> None:
        """Watch, on another thread, whether the first one is stuck: the store may be stopped, or
        away.
        """
        turn, ticks = self._board.turn, 0
        while not (self._stopped.wait(_BEAT_S) or self._case.closed.is_set()):
            # counts turns, not seconds, because this process may be stopped
            turn, ticks = self._board.turn, ticks + 1 if turn == self._board.turn else 0
            limit_s = 2 * _DEAD_S if self._case.doubt else self._judge.silent_s
            if not self._server.is_alive():
                # it let go of a store after its holder left
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
        """Log a verdict that the program does not hear, because it neither waits nor is in a
        step.
        """
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
