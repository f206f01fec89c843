"""What ranks write of themselves on the store where they meet: each its beat, all one verdict.

    beat/<rank>   JSON: how often it beat, where it works or waits, its host, whether it has left
    verdict       JSON: what befell the job; whoever finds out first writes it (compare-and-set)

Costs one small write and two small reads a rank every half second, however many ranks there are.
Who reads them when, and what follows from that, is in heartbeat.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from torch.distributed import Store

from shoal.contracts.launcher import VERDICT
from shoal.core.errors import DeadlinePassed, PeerLost, WorldError

BEATING = "beating"
LEFT = "left"  # the program has ended
QUIET = "quiet"  # it has heard what it must, and reads no more


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
            do += (
                ". If that rank had done its work, its loader had fewer batches (shoal.shard gives "
                "every rank as many), or other ranks alone call state_dict() or evaluate, where "
                "layers are cut"
            )
        problem = f"a peer was lost: {self.what}"
        return PeerLost(problem, where=where, got=self.got, do=do, rank=self.rank)


@dataclass
class Beat:
    """What a rank last wrote of itself, and when this one first saw it."""

    count: int = -1
    at: str = "start"
    host: str = "?"
    waiting: bool = False
    state: str = BEATING
    seen: float = 0.0


@final
class Board:
    """The beats and the verdict, as one rank writes and reads them.

    Args:
        store: where all ranks meet.
        rank: this one.
        hosts: of every rank.
    """

    def __init__(self, store: Store, rank: int, hosts: Sequence[str]) -> None:
        self.at, self.waiting = "start", False  # what this rank's next beat says
        self.turn = 0.0  # when the store answered last, by the monotonic clock
        self.beats = {r: Beat(host=host) for r, host in enumerate(hosts) if r != rank}
        self.rank, self.host = rank, hosts[rank]
        self._store, self._count = store, 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.beats) + 1

    def write(self, state: str) -> None:
        """Beat."""
        self._count += 1
        words = {
            "count": self._count,
            "at": self.at,
            "host": self.host,
            "waiting": self.waiting,
            "state": state,
        }
        self._store.set(f"beat/{self.rank}", json.dumps(words))

    def read(self, rank: int) -> Beat:
        """The last beat of a rank."""
        words: dict[str, Any] = {"host": self.beats[rank].host}
        if self._store.check([f"beat/{rank}"]):
            words = json.loads(self._store.get(f"beat/{rank}"))
        known = self.beats[rank]
        if not known.seen or known.count != words.get("count", -1):
            self.beats[rank] = Beat(**words, seen=self.turn)
        return self.beats[rank]

    def forget(self) -> None:
        """Count silence from now on: this process was stopped, perhaps all of them were."""
        self.beats = {rank: Beat() for rank in self.beats}

    def lost(self, ranks: Iterable[int], silent_s: float, or_left: bool) -> Verdict | None:
        """The first of these ranks that is silent for so long, or has left, if that counts."""
        for rank in ranks:
            beat = self.read(rank)
            who = f"rank {rank} (host {beat.host})"
            if beat.state == BEATING and self.turn - beat.seen > silent_s:
                return Verdict(f"{who} gives no sign of life, last seen at: {beat.at}", rank)
            if beat.state == LEFT and or_left:
                return Verdict(f"{who} has ended its program, last at: {beat.at}", rank, left=True)
        return None

    def published(self) -> Verdict | None:
        """The verdict, if there is one."""
        if not self._store.check([VERDICT]):
            return None
        return Verdict(**json.loads(self._store.get(VERDICT)))

    def agreed(self, verdict: Verdict) -> Verdict:
        """Write the verdict if it is the first; the one that stands."""
        standing = self._store.compare_set(VERDICT, "", json.dumps(asdict(verdict)))
        return Verdict(**json.loads(standing))
