"""Members of a round with a quorum: the ranks whose steps count in it, and when it closes.

    need      ceil(quorum · ranks that are not away), at least 1
    calls     a tenth of the round's time after `need` ranks have come, or half of `grace_s`: the
              other ranks are called, so that a slow one brings the steps that it has made
    closes    once `need` ranks have come, and every rank that is expected; or `grace_s` later

A rank is expected if it came to the last round, or has come back since. So a rank that is stopped
for long costs one grace time, and not one a round. A rank is away while it waits for the others
outside of rounds, as in `shoal.save`, and after its program has ended: it holds up no round then.

Nothing here knows of messages or threads. Guarded by tests/strategies/test_round_members.py.
Reference: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026,
arXiv 2604.21428, has a minimum quorum and a grace window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import final

_SLOWER = 0.1  # share of a round's time that a rank may be slower than a quorum of the others
_OF_GRACE = 0.5  # share of the grace time after which ranks are called at the latest


@final
class RoundMembers:
    """The ranks of one round after another.

    Args:
        ranks: number of ranks.
        quorum: the share of the ranks that closes a round.
        grace_s: seconds from a quorum until the round closes without the ranks that are missing.
    """

    def __init__(self, ranks: int, quorum: float, grace_s: float) -> None:
        self._ranks, self._quorum, self._grace_s = ranks, quorum, grace_s
        self.here: set[int] = set()  # ranks that have come to this round
        self._expected = set(range(ranks))
        self._away: set[int] = set()
        self.ended: set[int] = set()  # ranks that make no steps any more
        self._begun_s = -math.inf  # time at which the round began
        self.met_s: float | None = None  # time at which the quorum was there

    def come(self, rank: int) -> None:
        """Note that a rank has come to this round."""
        self.here.add(rank)
        self.back(rank)

    def back(self, rank: int) -> None:
        """Note that a rank makes steps of this round, although it may have missed others."""
        self._expected.add(rank)
        self._away.discard(rank)

    def away(self, rank: int) -> None:
        """Note that a rank waits for the others outside of rounds, until this round closes."""
        self._away.add(rank)

    def end(self, rank: int) -> None:
        """Note that a rank makes no steps any more."""
        self.ended.add(rank)

    @property
    def missing(self) -> set[int]:
        """Ranks that have not come to this round, and may."""
        return set(range(self._ranks)) - self.here - self.ended

    @property
    def need(self) -> int:
        """Number of ranks that are a quorum now."""
        absent = (self._away | self.ended) - self.here
        return max(1, math.ceil(self._quorum * (self._ranks - len(absent)) - 1e-9))

    def closes_in_s(self, now_s: float) -> float:
        """Return the seconds until the round closes: 0 at once, infinite without a quorum.

        Args:
            now_s: the time now, by a clock that never goes back.
        """
        if len(self.here) < self.need:
            self.met_s = None
            return math.inf
        if self.met_s is None:
            self.met_s = now_s
        if self._expected <= self.here | self._away | self.ended:
            return 0.0
        return max(0.0, self.met_s + self._grace_s - now_s)

    def calls(self, now_s: float) -> bool:
        """Return whether the ranks that are missing are to bring the steps that they have made.

        A rank that is a little slower than the others makes all of its steps.
        """
        if self.met_s is None:  # no quorum has come
            return False
        slower_s = min(_SLOWER * (self.met_s - self._begun_s), _OF_GRACE * self._grace_s)
        return now_s - self.met_s > slower_s

    def close(self, now_s: float) -> list[int]:
        """Close the round, and begin the next one. Return the ranks that came, in their order."""
        members = sorted(self.here)
        self._begin(members, now_s)
        return members

    def begin(self, now_s: float) -> None:
        """Begin a round in which every rank makes steps from the same weights."""
        self._begin(range(self._ranks), now_s)

    def _begin(self, expected: Iterable[int], now_s: float) -> None:
        self._expected, self.here = set(expected), set()
        self._begun_s, self.met_s = now_s, None
        self._away.clear()
