"""Beats of the ranks on the store where they meet, and the one verdict of all ranks.

    beat/<rank>   its count, the place where it works or waits, its host, whether it has left
    verdict       why the job failed; the rank that finds out first writes it (compare-and-set)

Each rank makes one small write and two small reads every half second, for any number of ranks.
Values are signed (contracts/store_values.py). An unsigned value is neither a sign of life nor a
verdict. If a stranger keeps writing to a key, that is not a sign of death either, because the
rank's own beat is lost there. heartbeat.py reads the beats and decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import final

from shoal.comm.pulse import STOPPED, PulseAddress, Pulses
from shoal.comm.rendezvous import has_agent
from shoal.comm.wait_places import ALIKE, Journal, RankPlace, SentSummons
from shoal.contracts.launcher import VERDICT
from shoal.contracts.store_values import Values
from shoal.core.errors import DeadlinePassed, PeerLost, RanksDiffer, WorldError
from shoal.core.open_files import MORE_FILES, ran_out

BEATING = "beating"
LEFT = "left"  # the program has ended
QUIET = "quiet"  # it has heard enough, and reads no more
_DOCTOR = (
    "run `shoal doctor` on every host: it tells a link that is slow, and one that loses large "
    "packets (MTU), by which ranks meet and then wait for their first large message"
)
_FRESH_S = 3.0
_TRIES, _PAUSE_S = 10, 0.005  # attempts to read a verdict that a stranger overwrites


@dataclass(frozen=True)
class Verdict:
    """Reason why the job failed: the same words on every rank."""

    what: str
    rank: int | None  # the rank that failed first, if one did
    got: str = ""
    deadline: bool = False
    left: bool = False  # that rank's program ended by itself
    differ: bool = False  # ranks are at different places, which their programs can put right
    broke: bool = False  # a connection broke, but no rank did

    def error(self, where: str) -> WorldError | RanksDiffer:
        """Return the verdict as the error that a rank raises, with the place of that rank."""
        if self.differ:
            do = f"{ALIKE}. Then start the job again: the ranks have parted for good"
            return RanksDiffer(self.what, where=where, got=self.got, do=do, rank=self.rank)
        if self.broke:
            what = f"a connection was lost: {self.what}"
            do = MORE_FILES if ran_out(self.got) else f"{_DOCTOR}; start the job again"
            return PeerLost(what, where=where, got=self.got, do=do)
        if self.deadline:
            do = "let every rank do the same forward and backward calls, or raise init(timeout_s=…)"
            if self.rank is None:
                do = f"{_DOCTOR}; or raise init(timeout_s=…)"
            return DeadlinePassed(self.what, where=where, got=self.got, do=do, rank=self.rank)
        again = "this host's agent starts it again" if has_agent() else "start the job again"
        do = f"see what that rank printed last; {again}"
        if self.left:
            do += (
                ". If that rank had done its work, its loader had fewer batches (shoal.shard gives "
                "every rank as many), or it has destroyed torch's process groups while other ranks "
                "alone call state_dict() or evaluate, where layers are cut"
            )
        problem = f"a peer was lost: {self.what}"
        return PeerLost(problem, where=where, got=self.got, do=do, rank=self.rank)


@dataclass(frozen=True)
class Beat:
    """Last report of a rank about itself."""

    count: int = -1
    at: str = "start"
    host: str = "?"
    waiting: bool = False
    state: str = BEATING
    place: RankPlace | None = None


@dataclass(frozen=True)
class Sight:
    """Time at which this rank last saw another's beat, and values of strangers in its place."""

    seen: float = 0.0
    stranger: bytes = b""  # a value that is not a beat
    stirred: float = 0.0  # time at which that value last changed


@final
class BeatBoard:
    """Beats and verdict, as one rank writes and reads them.

    Args:
        values: values in the store where all ranks meet.
        rank: this rank.
        hosts: the host of every rank.
        journal: the journal of this rank.
        pulses: pulses of the other ranks, which are asked if beats are missing.
    """

    def __init__(
        self,
        values: Values,
        rank: int,
        hosts: Sequence[str],
        journal: Journal,
        pulses: Pulses,
    ) -> None:
        self.at, self.waiting = "start", False  # contents of this rank's next beat
        self.turn = 0.0  # time of the store's last answer, by the monotonic clock
        self._asked_s = 0.0  # time at which a pulse was last asked whether it has ended
        self.beats = {r: Beat(host=host) for r, host in enumerate(hosts) if r != rank}
        self.rank, self.host = rank, hosts[rank]
        self.journal, self.pulses = journal, pulses
        self._values, self._count = values, 0
        self._sights = dict.fromkeys(self.beats, Sight())
        self._silent: set[int] = set()  # ranks without a beat that live, and were reported

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.beats) + 1

    def connect(self, timeout_s: float) -> None:
        """Open an own connection, on which each call takes so long at most."""
        self._values = self._values.clone(timeout_s)

    def write(self, state: str) -> None:
        """Write the next beat."""
        self._count += 1
        beat = Beat(self._count, self.at, self.host, self.waiting, state, self.journal.place())
        self._values.write(f"beat/{self.rank}", beat)
        self._values.mend()

    def read(self, rank: int) -> Beat:
        """Read the last beat of a rank."""
        key, sight = f"beat/{rank}", self._sights[rank]
        found = self._values.seen(key)
        beat = self._values.value_of(key, found, Beat)
        # not a copy of an earlier beat
        if beat is not None and beat.count > self.beats[rank].count:
            self.beats[rank], sight = beat, replace(sight, seen=self.turn)
        elif beat is None and found not in (b"", sight.stranger):
            sight = replace(sight, stranger=found, stirred=self.turn)
        self._sights[rank] = sight if sight.seen else replace(sight, seen=self.turn)
        return self.beats[rank]

    def forget(self) -> None:
        """Count silence from now on, because this process was stopped, and perhaps all of them
        were.
        """
        self.beats = {rank: Beat(host=beat.host) for rank, beat in self.beats.items()}
        self._sights = dict.fromkeys(self.beats, Sight())

    def next_one(self) -> list[int]:
        """Return the rank after this one that has not ended, so that one rank looks at each."""
        ranks = ((self.rank + step) % self.size for step in range(1, self.size))
        return list(islice((rank for rank in ranks if self.read(rank).state == BEATING), 1))

    def is_fresh(self, rank: int) -> bool:
        """Return whether a rank has beaten recently, so that its place is still true."""
        return self.turn - self._sights[rank].seen < _FRESH_S

    def all_beat_since(self, moment_s: float) -> bool:
        """Return whether every rank that has not ended was seen to beat since then."""
        return all(
            self.read(rank).state != BEATING or self._sights[rank].seen > moment_s
            for rank in self.beats
        )

    def lost(
        self, ranks: Iterable[int], silent_s: float, *, or_left: bool, or_unread: bool = False
    ) -> Verdict | None:
        """Return the verdict about the first of these ranks that is silent for so long.

        Args:
            ranks: the ranks to look at.
            silent_s: seconds without a beat.
            or_left: a rank that has left counts, too.
            or_unread: a rank counts, too, if its beat cannot be read because a stranger overwrites
                it.
        """
        for rank in ranks:
            beat, sight = self.read(rank), self._sights[rank]
            who = f"rank {rank} (host {beat.host})"
            last = sight.seen if or_unread else max(sight.seen, sight.stirred)
            if beat.state == BEATING and self.turn - last > silent_s:
                state = self.pulses.state(rank)
                if state and state not in STOPPED:
                    self._tell_of_silent(rank, self.turn - last)
                    self._sights[rank] = replace(sight, seen=self.turn)
                    continue
                how = "gives no sign of life" + (": its process is stopped" if state else "")
                return Verdict(f"{who} {how}, last seen at: {beat.at}", rank)
            if beat.state == LEFT and or_left:
                return Verdict(f"{who} has ended its program, last at: {beat.at}", rank, left=True)
        return None

    def ended(self, ranks: Iterable[int], silent_s: float) -> Verdict | None:
        """Return the verdict about the first of these ranks that is silent because its process has
        ended.

        The rank's pulse ends with it, and its host refuses the connection. A host that is away
        refuses nothing, so it takes longer to tell (`lost`).
        """
        for rank in ranks:
            beat, sight = self.read(rank), self._sights[rank]
            last = max(sight.seen, sight.stirred, self._asked_s)
            if beat.state != BEATING or self.turn - last <= silent_s:
                continue
            self._asked_s = self.turn
            if self.pulses.has_ended(rank):
                who = f"rank {rank} (host {beat.host})"
                how = "gives no sign of life: its process has ended"
                return Verdict(f"{who} {how}, last seen at: {beat.at}", rank)
        return None

    def meet_pulses(self) -> None:
        """Learn the addresses of pulses that are not known yet."""
        for rank in self.beats.keys() - self.pulses.addresses.keys():
            address = self._values.read(f"pulse/{rank}", PulseAddress)
            if address is not None:
                self.pulses.addresses[rank] = address

    def summon(self) -> None:
        """Summon others to the place where this rank waits, and take the summons of others.

        This covers only channels on which a rank may take part on any thread. Each of them costs
        one read.
        """
        own = self.journal.summons()
        if own is not None:
            self._values.write(f"summons/{own.channel}", own)
        for channel in self.journal.attended_channels():
            summons = self._values.read(f"summons/{channel}", SentSummons)
            if summons is not None:
                self.journal.heed(summons)

    def _tell_of_silent(self, rank: int, silent_s: float) -> None:
        if rank not in self._silent:
            self._silent.add(rank)
            logging.getLogger("shoal").warning(
                f"shoal: rank {rank} (host {self.beats[rank].host}) has not beaten for "
                f"{silent_s:.0f} s, but its process lives: something in it keeps Python's lock, or "
                "it gets no processor. It is waited for"
            )

    def published_verdict(self) -> Verdict | None:
        """Return the verdict, if there is one."""
        for _ in range(_TRIES):
            seen = self._values.seen(VERDICT)
            verdict = self._values.value_of(VERDICT, seen, Verdict)
            if verdict is not None or not seen:
                return verdict
            time.sleep(_PAUSE_S)  # the rank that wrote it puts it back
        return None

    def repeat(self, for_s: float) -> None:
        """Keep writing this rank's values for a while, if a stranger overwrites them."""
        until = time.monotonic() + for_s
        while self._values.are_disturbed and time.monotonic() < until:
            self._values.mend()
            time.sleep(_PAUSE_S)

    def agree(self, verdict: Verdict) -> Verdict:
        """Write the verdict if it is the first. Return the one that stands."""
        return self._values.agree(VERDICT, verdict)
