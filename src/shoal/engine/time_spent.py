"""Time of the main thread in its steps, in the parts that a prediction has.

    ┆ optimizer ┆ between steps ┆ forward, backward: compute, and waits for exchanges ┆
    backward ended                                                       backward ended

A step goes from the end of one backward that sends to the end of the next. The last 256 steps are
kept. The result is the mean of their middle half, so that a step with an evaluation in it does not
count.

This costs five reads of a clock for each step. Guarded by tests/engine/test_time_spent.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from time import perf_counter
from typing import NamedTuple, final

from shoal.core.eager_methods import eager
from shoal.core.outcome import Spending

# number of steps kept, and of first steps among them that do not count if there are more
_KEPT, _WARM_UP = 256, 5
_MIDDLE = 0.25  # part of the steps that are too short to count, and the same part that are too long


class _StepTimes(NamedTuple):
    """Times of one step."""

    seconds: float
    compute_s: float
    waiting_s: float
    optimizer_s: float
    between_s: float


@final
class Spent:
    """Time spent on one model, on one rank.

    Args:
        waited_s: seconds that the main thread has waited so far, in all.
        clock: returns seconds.
    """

    def __init__(
        self, waited_s: Callable[[], float], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._waited_s, self._clock = waited_s, clock
        self._steps: deque[_StepTimes] = deque(maxlen=_KEPT)
        # time, and the time waited by then: when the last backward ended, at the first forward
        # since, and when the running step of an optimizer began
        self._ended: tuple[float, float] | None = None
        self._entered: tuple[float, float] | None = None
        self._began: tuple[float, float] | None = None
        self._optimizer_s = 0.0  # seconds since the last backward ended

    @property
    def is_called(self) -> bool:
        """Whether the model was called, with gradients on, and no backward has ended since."""
        return self._entered is not None

    def forward(self) -> None:
        """Note that the model is called."""
        if self._entered is None:
            self._entered = self._now()

    @eager
    def on_step_begin(self) -> None:
        """Note that an optimizer's step begins."""
        self._began = self._now()

    @eager
    def on_step_end(self) -> None:
        """Note that the step has ended."""
        if self._began is not None:
            (began_s, before_s), (now_s, waited_s) = self._began, self._now()
            self._optimizer_s += max(0.0, now_s - began_s - (waited_s - before_s))
            self._began = None

    def backward(self) -> None:
        """Note that a backward has ended, and gradients are there."""
        now = now_s, waited_s = self._now()
        if self._ended is not None:
            ended_s, before_s = self._ended
            entered_s, until_s = self._entered or self._ended
            seconds, waiting_s = now_s - ended_s, waited_s - before_s
            compute_s = max(0.0, now_s - entered_s - (waited_s - until_s))
            rest_s = seconds - compute_s - waiting_s - self._optimizer_s
            self._steps.append(
                _StepTimes(seconds, compute_s, waiting_s, self._optimizer_s, max(0.0, rest_s))
            )
        self._ended, self._entered, self._optimizer_s = now, None, 0.0

    def told(self, waits: dict[str, float]) -> Spending:
        """Return the mean of the middle steps. `waits` are the seconds so far of each exchange."""
        steps = list(self._steps)
        warm = sorted(steps[_WARM_UP:] or steps)
        if not warm:
            return Spending()
        left_out = int(_MIDDLE * len(warm))
        middle = warm[left_out : len(warm) - left_out]
        _, compute_s, waiting_s, optimizer_s, between_s = map(fmean, zip(*middle, strict=True))
        label = max(waits, key=lambda each: waits[each], default="")
        part = waits[label] / sum(waits.values()) if label and waits[label] else 0.0
        return Spending(
            len(steps), compute_s, waiting_s, optimizer_s, between_s, label, part * waiting_s
        )

    def _now(self) -> tuple[float, float]:
        return self._clock(), self._waited_s()
