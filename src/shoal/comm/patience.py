"""Patience: the time to wait for a rank, by the reason why an exchange does not go on.

    COMPUTES    a rank has not come. It lives and does not wait: it may evaluate, save or load
                data alone. A rank that waits for such a rank counts the same                 30 min
    ELSEWHERE   a rank has not come, and waits for something else                             90 s
    TOGETHER    all have come: a link is slow or stuck. Ten times the predicted step, at
                least 60 s; if nothing is predicted, since the last message                   300 s
    UNKNOWN     it depends on hosts that do not train, which keep no journal: since the last
                message                                                                       300 s

If the user gives a `timeout_s`, it replaces all these limits. Other files handle a rank that is
dead or stopped (heartbeat.py), and ranks that wait for one another (wait_places.py). Guarded by
tests/comm/test_lookout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from shoal.comm.wait_places import ChannelWait, RankPlace


class Reason(IntEnum):
    """Reason why a wait goes on; a greater reason allows a longer wait."""

    ELSEWHERE = 0
    UNKNOWN = 1
    TOGETHER = 2
    COMPUTES = 3


@dataclass(frozen=True)
class Absence:
    """Ranks that have not come to an exchange, and the reason."""

    reason: Reason
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Patience:
    """Seconds to wait, for each reason.

    Args:
        given_s: the user's own limit, which holds for every reason.
        computes_s: seconds for a rank that lives and does not wait.
        elsewhere_s: seconds for a rank that waits for something else.
        silent_s: seconds without any message, in an exchange without a prediction.
    """

    given_s: float | None = None
    computes_s: float = 1800.0
    elsewhere_s: float = 90.0
    silent_s: float = 300.0

    @property
    def longest_s(self) -> float:
        """Seconds that an exchange may take at most."""
        return self.computes_s if self.given_s is None else self.given_s

    @property
    def connects_s(self) -> float:
        """Seconds for making connections."""
        return self.silent_s if self.given_s is None else self.given_s

    def limit_s(self, reason: Reason, planned_s: float | None) -> float:
        """Return the seconds that a wait may last for one reason.

        Args:
            reason: why the wait goes on.
            planned_s: the limit that the plan sets once all ranks have come, if it sets any.
        """
        if self.given_s is not None:
            return self.given_s
        if reason is Reason.COMPUTES:
            return self.computes_s
        if reason is Reason.ELSEWHERE:
            return self.elsewhere_s
        is_planned = reason is Reason.TOGETHER and planned_s is not None
        return planned_s if is_planned and planned_s is not None else self.silent_s


USUAL = Patience()


def absence(own: int, places: Mapping[int, RankPlace]) -> Absence | None:
    """Return why the wait of rank `own` goes on, according to all ranks' places; None without a
    wait.
    """
    wait = places[own].wait
    if wait is None:
        return None
    if not wait.number:
        return Absence(Reason.UNKNOWN)
    absent = _absent(wait, places)
    if not absent:
        return Absence(Reason.TOGETHER)
    seen = frozenset((own, *absent))
    reasons = {rank: _reason(rank, places, seen) for rank in absent}
    worst = max(reasons.values())
    return Absence(worst, tuple(rank for rank in absent if reasons[rank] is worst))


def _absent(wait: ChannelWait, places: Mapping[int, RankPlace]) -> list[int]:
    return [
        rank
        for rank in wait.members
        if rank not in places or places[rank].begun.get(wait.channel, 0) < wait.number
    ]


def _reason(rank: int, places: Mapping[int, RankPlace], seen: frozenset[int]) -> Reason:
    """Return why a rank has not come.

    It counts as computing if it waits for a rank that computes.
    """
    place = places.get(rank)
    if place is None:
        return Reason.UNKNOWN
    if place.wait is None:
        return Reason.COMPUTES
    if not place.wait.number:
        return Reason.UNKNOWN
    absent = _absent(place.wait, places)
    if not absent:  # an exchange goes on there, with a limit of its own
        return Reason.COMPUTES
    more = [other for other in absent if other not in seen]
    seen = seen.union(more)
    return max((_reason(other, places, seen) for other in more), default=Reason.ELSEWHERE)
