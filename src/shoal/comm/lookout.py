"""Sees in the beats whether ranks wait for one another in vain, and who keeps the others waiting.

A rank looks only while it waits itself, and the more seldom the higher its number: mostly rank 0
sees first what there is, and the store has little to do. What is found is certain after two looks
(places.py). Costs one read a rank and look.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import final

from shoal.comm.beats import BEATING, Beat, BeatBoard, Verdict
from shoal.comm.places import Apart, RankPlace, all_are_in, apart, missed, named, unlike

_SELDOM = 32  # turns between two looks at most
_TURN_S = 0.25  # between two turns of one that waits, at least
_LONG_S = 3.0  # a rank that others wait for as long as this is named
_LOGGER = logging.getLogger("shoal")


@final
class Lookout:
    """One rank's look at what every rank is at.

    Args:
        board: where ranks say so.
        workers: how many ranks train; the others wait for these by turns that they have not made.
    """

    def __init__(self, board: BeatBoard, workers: int) -> None:
        self._board, self._journal, self._workers = board, board.journal, workers
        self._turns = 0  # of this wait
        self._began_s = 0.0
        self._before: tuple[Apart | None, Mapping[int, int]] = None, {}
        self._has_warned = False
        self._awaited: tuple[str, int] | None = None  # what all ranks are in
        self._looks = 0  # turns since that was seen

    def look(self) -> Verdict | None:
        """In a turn of the heartbeat: the verdict that ranks wait in vain, if they do."""
        if self._journal.wait is None or self._board.rank >= self._workers:
            self._turns = 0
            return None
        if self._turns == 0:
            self._began_s = time.monotonic()
            self._before = None, {}
        self._turns += 1
        if self._turns % min(self._board.rank + 1, _SELDOM):
            return None
        places, counts = self._read()
        self._journal.asked |= missed(self._board.rank, places)
        found, (before, then) = apart(places), self._before
        self._before = found, counts
        if found is None:
            self._warn(places)
            return self._overdue(places)
        newer = all(counts[rank] > then.get(rank, counts[rank]) for rank in counts)
        if found.waits and not (found == before and newer):
            return None
        return Verdict(found.what, found.rank, differ=True)

    def _overdue(self, places: Mapping[int, RankPlace]) -> Verdict | None:
        """The verdict that an exchange takes far longer than planned, though all are in it.

        Counted are looks, not seconds: this process may have been stopped.
        """
        wait, limit_s = self._journal.wait, self._journal.limit_s()
        if wait is None or limit_s is None or not all_are_in(wait, places):
            self._awaited, self._looks = None, 0
            return None
        if (wait.channel, wait.number) != self._awaited:
            self._awaited, self._looks = (wait.channel, wait.number), 0
        self._looks += min(self._board.rank + 1, _SELDOM)
        if self._looks * _TURN_S < limit_s:
            return None
        return Verdict(
            f"an exchange that all ranks are in took over {limit_s:.0f} s, far longer than "
            f"the plan predicts of a step: rank {self._board.rank} waited at: {wait.at}",
            None,
            got="every rank has come there: a link is stuck, or far slower than it was measured",
            deadline=True,
        )

    def differing(self) -> Verdict | None:
        """The verdict that ranks are at different things, for one that has noticed it."""
        found = unlike(self._read()[0])
        return None if found is None else Verdict(found.what, found.rank, differ=True)

    def _read(self) -> tuple[dict[int, RankPlace], dict[int, int]]:
        """What every worker is at that goes on still, and how often each other one has beaten."""
        beats: dict[int, Beat] = {
            rank: self._board.read(rank) for rank in self._board.beats if rank < self._workers
        }
        there = {rank: beat for rank, beat in beats.items() if beat.state == BEATING}
        places = {rank: beat.place for rank, beat in there.items() if beat.place is not None}
        places[self._board.rank] = self._journal.place()
        return places, {rank: beats[rank].count for rank in places if rank in beats}

    def _warn(self, places: Mapping[int, RankPlace]) -> None:
        """Name once who keeps the others waiting: the first of these does."""
        first = min((rank for rank, place in places.items() if place.wait), default=None)
        waited_s = time.monotonic() - self._began_s
        if self._has_warned or waited_s < _LONG_S or first != self._board.rank:
            return
        wait = places[first].wait
        assert wait is not None
        late = [
            rank
            for rank, place in places.items()
            if place.wait is None
            and rank in wait.members
            and place.begun.get(wait.channel, 0) < wait.number
        ]
        if late and not wait.at.startswith("parallelize"):
            self._has_warned = True
            last = self._board.beats[late[0]].at
            _LOGGER.warning(
                f"shoal: rank {first} waits for {named(late)} (last at: {last}), which has not "
                f"come there, for {waited_s:.0f} s already, at: {wait.at}. It computes, or waits "
                "outside Shoal, or makes other calls: all ranks call the model, evaluate and save "
                "together"
            )
