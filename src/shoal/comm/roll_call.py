"""Roll call: each rank reports itself, and all hear which ranks are missing, or started
differently.

    1  here    each rank writes its arrival, with a number that is its process's own (`nonce`)
    2  call    rank 0 calls the ranks that are here, by these numbers, and again as more come
    3  ready   each called rank answers
    4  go      all have answered the same call: its id is the scope of all later values

Why so: a launcher that starts a job again keeps its store, so values of an earlier start still
stand there. But a process that has ended answers no call, and the newest process of a rank
overwrites the values of an older one. An older one that still waits sees this, and ends.

Cost: four turns of some milliseconds, once. In each, rank 0 reads two small values of each rank.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from shoal.contracts.launcher import GO, Seat
from shoal.contracts.store_values import Values
from shoal.contracts.versions import Versions, install_shoal, versions
from shoal.core.errors import MissingRank, RanksDiffer, UsageError

# seconds from turn to turn: after a change, and when nothing changes
_QUICK_S, _SLOW_S = 0.002, 0.05
_LOOK_S = 0.1  # seconds between two looks of a rank whether a start without it has happened
_MOST_NAMES = 8
# settings that all ranks must share: fields of `Arrival`, and their names for people
_SETTINGS = {"size": "WORLD_SIZE", "servers": "SHOAL_SERVERS", "tail": "SHOAL_TAIL"}


@dataclass(frozen=True)
class Arrival:
    """Rank that has arrived, as it reports itself to the others."""

    rank: int
    nonce: str  # number of this process
    host: str
    pid: int
    came: str  # the time of day
    size: int  # number of all ranks
    servers: int
    tail: int
    versions: Versions
    address: str = ""  # address by which it reaches the store; "" if it made no connection itself
    is_beside_store: bool = False  # whether the store is on this rank's host
    machine: str = ""  # equal for ranks that share their interfaces
    problem: str = ""  # reason why it cannot take part

    @classmethod
    def at(cls, seat: Seat, rank: int, size: int, **found: Any) -> Arrival:
        """Make the arrival of this process."""
        return cls(
            rank=rank,
            nonce=uuid.uuid4().hex,
            host=seat.host,
            pid=os.getpid(),
            came=time.strftime("%H:%M:%S"),
            size=size,
            servers=seat.servers,
            tail=seat.tail,
            versions=versions(),
            **found,
        )

    @property
    def process(self) -> str:
        """Description of this process, for messages."""
        return f"process {self.pid} on host {self.host}, which came at {self.came}"

    @property
    def where(self) -> str:
        """Description of this rank, for messages."""
        return f"rank {self.rank}, host {self.host}"

    def refuses(self, other: Arrival) -> UsageError | None:
        """Return why this rank cannot train with the other one, if it cannot."""
        who = f"rank {other.rank} (host {other.host})"
        if other.problem:
            return RanksDiffer(
                f"{who} cannot take part: {other.problem}",
                where=self.where,
                do="see that rank's own message",
                rank=other.rank,
            )
        for field, name in _SETTINGS.items():
            got, expected = str(getattr(other, field)), str(getattr(self, field))
            if got != expected:
                what = f"{who} was started with another {name}"
                do = f"give the same {name} on every rank"
                return RanksDiffer(
                    what, where=self.where, got=got, expected=expected, do=do, rank=other.rank
                )
        for name in ("shoal", "torch"):
            got, expected = getattr(other.versions, name), getattr(self.versions, name)
            if release(got) != release(expected):
                what = f"{who} has another version of {name}"
                how = f"pip install torch=={release(expected)}"
                if name == "shoal":
                    how = install_shoal(version=release(expected))
                do = f"install the same on every host: {how}"
                return RanksDiffer(
                    what, where=self.where, got=got, expected=expected, do=do, rank=other.rank
                )
        return None


@dataclass(frozen=True)
class Over:
    """End of a roll call without a start."""

    missing: tuple[int, ...]
    heard: tuple[str, ...]  # nonces of the ranks that should hear it


@final
class RollCall:
    """One rank's part in the roll call.

    Args:
        values: the job's values in the store.
        own: the arrival of this rank.
        timeout_s: seconds to wait for the others.
        restarts: whether the launcher may start ranks again, so that values of an earlier start
            mean nothing.
        began_s: start of the waiting time, by the monotonic clock; by default now.
    """

    def __init__(
        self,
        values: Values,
        own: Arrival,
        timeout_s: float,
        *,
        restarts: bool,
        began_s: float | None = None,
    ) -> None:
        self._values, self._own, self._restarts = values, own, restarts
        self._timeout_s, self._began_s = timeout_s, time.monotonic() if began_s is None else began_s
        self._look_s = time.monotonic() + _LOOK_S
        self._called: tuple[str, ...] = ()  # the call that this rank has answered, by nonces

    def take(self) -> tuple[str, tuple[Arrival, ...]]:
        """Wait for the others. Return the id of the start, and all ranks.

        Raises:
            MissingRank: not every rank came in time. The error names the missing ranks.
            RanksDiffer: a rank was started unlike this one, or cannot take part.
            UsageError: another process is the same rank.
        """
        self._values.write(f"here/{self._own.rank}", self._own)
        deadline, pause_s = self._began_s + self._timeout_s, _QUICK_S
        while (found := self._turn()) is None:
            if time.monotonic() > deadline:
                self._give_up()
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _SLOW_S)
        start, everyone = found
        self._check_unlike(everyone)
        if len(everyone) != self._own.size:  # it went on without some ranks, because others differ
            what = "the ranks were started unlike one another"
            raise RanksDiffer(what, where=self._own.where, do="see the message of rank 0")
        return start, everyone

    def _turn(self) -> tuple[str, tuple[Arrival, ...]] | None:
        """Look at the store once.

        Return the start of this process with its ranks, if there is one.
        """
        self._values.mend()
        if self._own.rank == 0:
            if everyone := self._conduct():
                return identity(self._called), everyone
        else:
            self._answer()
            start = self._values.read(GO, str)
            if start == identity(self._called) and (everyone := self._roll(start)):
                return start, everyone
        if time.monotonic() > self._look_s:
            self._look_s = time.monotonic() + _LOOK_S
            self._check_place()
            self._check_end()
        return None

    def _conduct(self) -> tuple[Arrival, ...]:
        """Call the ranks that are here, on rank 0.

        If all have answered, say go and return all ranks.
        """
        own = self._own
        others = [self._values.read(f"here/{rank}", Arrival) for rank in range(1, own.size)]
        called = tuple(here.nonce if here else "" for here in (own, *others))
        start = identity(called)
        if called != self._called or self._values.read("call", tuple[str, ...]) != called:
            self._called = called
            self._values.write("call", called)
        answered = (own, *(here for here in others if here and self._said(here, start)))
        unlike = any(here.problem or own.refuses(here) for here in answered)
        if len(answered) < own.size and not unlike:
            return ()
        self._check_place()
        # it may leave out ranks, because a rank that differs reads here that it does
        self._values.write(f"roll/{start}", answered)
        self._values.write(GO, start, lasting=True)  # the launcher reads it at the end
        return answered

    def _answer(self) -> None:
        """Answer the call that names this process, on another rank."""
        call = self._values.read("call", tuple[str, ...]) or ()
        if self._own.nonce in call and call != self._called:
            self._called = call
            self._values.write(f"ready/{self._own.rank}", identity(call))

    def _said(self, here: Arrival, start: str) -> bool:
        return self._values.read(f"ready/{here.rank}", str) == start

    def _roll(self, start: str) -> tuple[Arrival, ...]:
        return self._values.read(f"roll/{start}", tuple[Arrival, ...]) or ()

    def _check_place(self) -> None:
        """Raise if another process has taken this one's place."""
        standing = self._values.read(f"here/{self._own.rank}", Arrival)
        if standing is None:  # a stranger has overwritten it
            self._values.write(f"here/{self._own.rank}", self._own)
        elif standing.nonce != self._own.nonce:
            raise self._replaced_error(standing)

    def _check_end(self) -> None:
        """Raise if the roll call is over, or the others have started without this process."""
        over = self._values.read("over", Over)
        if over is not None and (self._own.nonce in over.heard or not self._restarts):
            raise self._not_all(over.missing)
        if not self._restarts:
            self._check_start()

    def _check_start(self) -> None:
        """Raise if others have started, or have refused one another, without this process."""
        others = self._others_start()
        self._check_unlike(others)
        same_rank = next((here for here in others if here.rank == self._own.rank), None)
        if same_rank is not None:
            raise self._replaced_error(same_rank)

    def _others_start(self) -> tuple[Arrival, ...]:
        """Return the ranks of the newest start, unless this process is one of them."""
        start = self._values.read(GO, str)
        others = self._roll(start) if start is not None else ()
        return () if self._own.nonce in {here.nonce for here in others} else others

    def _check_unlike(self, others: Sequence[Arrival]) -> None:
        for other in others:
            if refusal := self._own.refuses(other):
                raise refusal

    def _give_up(self) -> None:
        """Raise MissingRank on all ranks that wait, or the error that kept the others from
        starting.
        """
        if not self._called:  # rank 0 may have come and gone
            self._check_unlike(self._others_start())
        ranks = range(self._own.size)
        here = [self._values.read(f"here/{rank}", Arrival) for rank in ranks]
        absent = [rank for rank in ranks if here[rank] is None]
        if self._called:
            start = identity(self._called)
            silent = [r for r in ranks if (each := here[r]) and not self._said(each, start)]
            absent += [rank for rank in silent if rank not in (0, self._own.rank)]
        else:  # rank 0 has not called this process
            absent = sorted({0, *absent})
        heard = tuple(each.nonce for each in here if each)
        self._values.write("over", Over(tuple(sorted(absent)), heard))
        raise self._not_all(absent)

    def _not_all(self, missing: Sequence[int]) -> MissingRank:
        size, most = self._own.size, _MOST_NAMES
        names = ", ".join(f"rank {r}" for r in missing[:most]) + (" …" if missing[most:] else "")
        strangers = [str(r) for r in missing if self._values.holds_other(f"here/{r}")]
        return MissingRank(
            f"{len(missing)} of {size} ranks did not start within {self._timeout_s:g} s: {names}",
            where=self._own.where,
            got=f"values with another SHOAL_TOKEN, or a stranger's, in place of ranks "
            f"{', '.join(strangers)}"
            if strangers
            else "",
            do="see what those ranks printed; start them, or raise init(start_timeout_s=…)",
            rank=missing[0] if missing else None,
        )

    def _replaced_error(self, other: Arrival) -> UsageError:
        return UsageError(
            f"there is a rank {self._own.rank} already",
            where=self._own.where,
            got=f"{other.process}, beside {self._own.process}",
            do="give every process a RANK of its own; end processes of an earlier start",
            rank=other.rank,
        )


def identity(call: Sequence[str]) -> str:
    """Return the id of a call."""
    return hashlib.blake2b(" ".join(call).encode(), digest_size=8).hexdigest()


def release(version: str) -> str:
    """Return a version without the part about its build."""
    return version.partition("+")[0]
