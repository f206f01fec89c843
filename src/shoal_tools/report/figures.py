"""The step's time as every report states it: one source for each figure, and its words.

    a step      in a benchmark: Shoal's median turn, on which its ratios are based. Else the account
                that ranks keep of their steps, compared with the prediction. Else the median
    predicted   the account's own, or the explained plan's: both come from one timeline

Guarded by tests/tools/report/test_figures.py. Reads core only.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.numbers import how_many
from shoal.core.outcome import Outcome
from shoal.core.record import Record


@dataclass(frozen=True)
class StepFigure:
    """The time of a step, and the words for it.

    Args:
        seconds: the time.
        counts: the steps, and how their times become one figure.
    """

    seconds: float
    counts: str


def measured_step(record: Record) -> StepFigure | None:
    """Return the measured time of a step; None if none was measured."""
    if record.contenders:
        shoal = record.contenders[0]
        turns = how_many(len(shoal.rounds_s), "turn")
        return StepFigure(shoal.median_s, f"median of {turns}, slowest rank")
    if record.outcome is not None and is_account(record.outcome):
        return StepFigure(record.outcome.measured_s, account(record.outcome))
    if record.step_s is not None:
        return StepFigure(record.step_s, "median step of rank 0")
    return None


def predicted_step_s(record: Record) -> float | None:
    """Return the predicted time of a step; None if there is no prediction."""
    if record.outcome is not None and record.outcome.predicted_s:
        return record.outcome.predicted_s
    return (record.explanation.step.total_s or None) if record.explanation is not None else None


def is_account(outcome: Outcome) -> bool:
    """Return whether an outcome has a time of its own, of several steps."""
    return outcome.steps > 1 and outcome.measured_s > 0


def account(outcome: Outcome) -> str:
    """Return the words for an outcome's time.

    Examples:
        >>> account(Outcome(0.06, 0.09, 20))
        'mean of the middle half of 20 steps, slowest rank'
    """
    return f"mean of the middle half of {how_many(outcome.steps, 'step')}, slowest rank"
