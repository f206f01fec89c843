"""Lookout: sees in the beats whether ranks wait for one another in vain, and names late ranks.

A rank looks only while it waits itself, and less often the higher its number. So rank 0 usually
finds a problem first, and the store has little to do. A finding is certain after two looks
(wait_places.py). Each look costs one read for each rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import final

from shoal.comm.beats import BEATING, Beat, BeatBoard, Verdict
from shoal.comm.patience import USUAL, Absence, Patience, Reason, absence
from shoal.comm.wait_places import Apart, ChannelWait, RankPlace, apart, missed, named, unlike

_SELDOM = 32  # most turns between two looks
_TURN_S = 0.25  # least seconds between two turns of a rank that waits
_LONG_S = 3.0  # a rank that keeps others waiting for so long is named
_MARKS_S = (20.0, 60.0)  # times of a wait at which a line says again which rank waits for which
# seconds to add to a limit of the user's. Gloo keeps that limit by the wall clock, which may jump
_LATER_S = 5.0
_LOGGER = logging.getLogger("shoal")


@final
class _Vigil:
    """Length of one wait, in this rank's own looks.

    It counts looks, not seconds, because this process may have been stopped.
    """

    def __init__(self, wait: tuple[str, int] | None) -> None:
        self.wait = wait
        self.same = 0  # turns since the finding last changed
        self._seen: object = None
        self._began_s, self._marks = time.monotonic(), list(_MARKS_S)

    def see(self, seen: object, turns: int) -> None:
        """Count a look that comes after so many turns."""
        self.same = self.same + turns if seen == self._seen else turns
        self._seen = seen

    @property
    def waited_s(self) -> float:
        """Seconds since the wait was first seen."""
        return time.monotonic() - self._began_s

    def is_due(self, times: float) -> bool:
        """Return whether a line is due, once for each mark. The marks are multiplied by `times`."""
        due = [mark for mark in self._marks if self.waited_s >= times * mark]
        self._marks = [mark for mark in self._marks if mark not in due]
        return bool(due)


@final
class Lookout:
    """One rank's look at the places of all ranks.

    Args:
        board: the board where ranks write their places.
        workers: number of ranks that train. The others do not number their waits.
        patience: the time to wait for ranks.
    """

    def __init__(self, board: BeatBoard, workers: int, patience: Patience = USUAL) -> None:
        self._board, self._journal, self._workers = board, board.journal, workers
        self._turns = 0  # turns of this wait
        self._began_s = 0.0
        self._before: tuple[Apart | None, Mapping[int, int]] = None, {}
        self._has_warned = False
        self._patience, self._vigil = patience, _Vigil(None)

    def look(self) -> Verdict | None:
        """Look, in a turn of the heartbeat.

        Return the verdict that ranks wait in vain, if they do.
        """
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
        if not (found == before and newer):  # a beat may be out of date
            return None
        return Verdict(found.what, found.rank, differ=True)

    def _overdue(self, places: Mapping[int, RankPlace]) -> Verdict | None:
        """Return the verdict that the wait has lasted too long for its reason.

        Lines of the log come before it, and tell the reason.
        """
        own = self._board.rank
        wait, found = places[own].wait, absence(own, places)
        if wait is None or found is None:
            return None
        if found.reason is Reason.ELSEWHERE and not all(map(self._board.is_fresh, found.ranks)):
            found = Absence(Reason.COMPUTES, found.ranks)  # it may have gone on since
        planned_s = self._journal.limit_s()
        limit_s = self._patience.limit_s(found.reason, planned_s)
        if (wait.channel, wait.number) != self._vigil.wait:
            self._vigil = _Vigil((wait.channel, wait.number))
        is_given, by_message = self._patience.given_s is not None, self._journal.messages
        seen: object = found, limit_s, by_message if limit_s == self._patience.silent_s else 0
        self._vigil.see(by_message if is_given else seen, min(own + 1, _SELDOM))
        if self._vigil.same * _TURN_S >= limit_s + (_LATER_S if is_given else 0.0):
            return self._verdict(wait, found, limit_s, places)
        first = min((rank for rank, place in places.items() if place.wait), default=None)
        # an exchange that is planned to take long gives no line until a third of its limit has
        # passed
        is_planned = found.reason is Reason.TOGETHER and planned_s is not None
        times = max(1.0, limit_s / _MARKS_S[-1]) if is_planned else 1.0
        if first == own and self._vigil.is_due(times):
            self._tell(wait, found, limit_s, places)
        return None

    def _verdict(
        self, wait: ChannelWait, found: Absence, limit_s: float, places: Mapping[int, RankPlace]
    ) -> Verdict:
        if found.reason is Reason.TOGETHER:
            got = "every rank has come there: a link is stuck, or far slower than it was measured"
            is_planned = self._patience.given_s is None and self._journal.limit_s() is not None
            what = (
                f"an exchange that all ranks are in took over {limit_s:.0f} s, far longer than "
                "the plan predicts of a step"
                if is_planned
                else f"an exchange that all ranks are in brought nothing for {limit_s:.0f} s"
            )
        else:
            what = f"an exchange did not end within {_duration(limit_s)}"
            got = f"absent: {self._absent(found, places)}"
        return Verdict(
            f"{what}: {self._who(self._board.rank)} waited at: {wait.at}",
            next(iter(found.ranks), None),
            got=got,
            deadline=True,
        )

    def _tell(
        self, wait: ChannelWait, found: Absence, limit_s: float, places: Mapping[int, RankPlace]
    ) -> None:
        why = (
            "All ranks have come there, so a link is slow or stuck: run `shoal doctor`"
            if found.reason is Reason.TOGETHER
            else f"It waits for {self._absent(found, places)}"
        )
        _LOGGER.warning(
            f"shoal: {self._who(self._board.rank)} has waited for {self._vigil.waited_s:.0f} s at: "
            f"{wait.at}. {why}. It gives up after {_duration(limit_s)}"
        )

    def _absent(self, found: Absence, places: Mapping[int, RankPlace]) -> str:
        """Describe the ranks that have not come, and their places."""
        if not found.ranks:
            return "hosts that do not train"
        first, *more = found.ranks
        who, last = self._who(first), self._board.beats[first].at
        who += f" and {named(more)}" if more else ""
        if found.reason is Reason.UNKNOWN:
            return f"{who}, not one of those that train" if first >= self._workers else who
        place = places.get(first)
        if found.reason is Reason.ELSEWHERE or (place is not None and place.wait is not None):
            return f"{who}, waiting at: {last}"
        return f"{who}, which computes, or does something alone (last at: {last})"

    def _who(self, rank: int) -> str:
        host = self._board.host if rank == self._board.rank else self._board.beats[rank].host
        return f"rank {rank} (host {host})"

    def differing(self) -> Verdict | None:
        """Return the verdict that ranks are at different places, for a rank that has noticed it."""
        found = unlike(self._read()[0])
        return None if found is None else Verdict(found.what, found.rank, differ=True)

    def _read(self) -> tuple[dict[int, RankPlace], dict[int, int]]:
        """Read the places of all workers that still run, and the number of beats of each other
        one.
        """
        beats: dict[int, Beat] = {
            rank: self._board.read(rank) for rank in self._board.beats if rank < self._workers
        }
        there = {rank: beat for rank, beat in beats.items() if beat.state == BEATING}
        places = {rank: beat.place for rank, beat in there.items() if beat.place is not None}
        places[self._board.rank] = self._journal.place()
        return places, {rank: beats[rank].count for rank in places if rank in beats}

    def _warn(self, places: Mapping[int, RankPlace]) -> None:
        """Warn once about the rank that keeps others waiting.

        The lowest rank that waits does it.
        """
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
                "outside Shoal, or makes other calls: all ranks train together"
            )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 600 else f"{seconds:g} s"
