"""The time when the next checkpoint is due, although ranks must decide it together and seldom talk.

Rank 0's clock decides. Ranks agree on the number of the step at which they decide next, by the
measured time of a step: after half of the remaining time, but at most so many seconds. So most
steps cost nothing, and a checkpoint, or the effect of a signal, is late by at most these seconds.
Guarded by tests/checkpoint/test_clock.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

_MOST_STEPS = 10_000


@final
class CheckpointClock:
    """A rank's clock, which tells when a checkpoint is due.

    Args:
        every_s: seconds from one checkpoint to the next.
        late_s: the most seconds between two decisions.
        now: a function that returns the time in seconds.
    """

    def __init__(
        self, every_s: float, late_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s, self._late_s, self._now = every_s, late_s, now
        self._last_s = self._decided_s = now()
        self._decided_at = 0

    @property
    def is_due(self) -> bool:
        """Return whether a checkpoint is due."""
        return self._now() - self._last_s >= self._every_s

    def saved(self) -> None:
        """Note that a checkpoint begins now."""
        self._last_s = self._now()

    def next_decision(self, step: int) -> int:
        """Return the step at which to decide next, as seen from this step."""
        now_s = self._now()
        steps = step - self._decided_at
        step_s = (now_s - self._decided_s) / steps if steps > 0 else self._late_s
        self._decided_s, self._decided_at = now_s, step
        left_s = max(0.0, self._every_s - (now_s - self._last_s))
        wait_s = min(left_s / 2, self._late_s)
        return step + max(1, min(_MOST_STEPS, int(wait_s / max(step_s, 1e-9))))
