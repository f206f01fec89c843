"""Prices of local steps in samples, as data: each run of the race with its source.

A plan has the price of the run that is most like it: the same outer rule, the same codec of rounds,
the same start, and rounds of as many steps or of the next longer ones that were measured. A start
that was not measured counts as none. A lag that was not measured costs what it cost in the run that
was. benchmarks/race.py makes the runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.contracts.learning import LearningPrice
from shoal.core.plan import Plan

EXACT_FIRST, GROWS, NO_START = "exact first", "growing rounds", "no start"
WARM_SHARE = 4  # the measured runs had one exact step first of so many steps in all
_LOCAL = "docs/lab/race.md, text from random weights, three seeds"
_RACE = "docs/lab/race.md, text from random weights"


@dataclass(frozen=True)
class LocalRun:
    """Runs with local steps, and their price.

    Args:
        length: steps of a round.
        codec: codec of the rounds; '' if they are exact.
        start: how the runs began: `NO_START`, `EXACT_FIRST` for a quarter of exact steps, or
            `GROWS` for rounds of 1, 2, 4 steps and so on.
        times: samples for a loss, as a multiple of the samples of exact steps.
        source: the page with the measurement, and the task.
        rule: the outer rule.
        lags: whether weights were under way for a round.
    """

    length: int
    codec: str
    start: str
    times: float
    source: str
    rule: str = "nesterov"
    lags: bool = False


_SEED = f"{_RACE}, one seed"
RUNS = (
    LocalRun(4, "", NO_START, 2.62, _LOCAL),
    LocalRun(16, "", NO_START, 1.37, _LOCAL),
    LocalRun(64, "", NO_START, 1.41, _LOCAL),
    LocalRun(16, "", EXACT_FIRST, 1.0, _LOCAL),
    LocalRun(16, "int4", NO_START, 1.45, _SEED),
    LocalRun(16, "int4", NO_START, 1.88, _SEED, lags=True),
    LocalRun(64, "int4", NO_START, 1.41, _SEED),
    LocalRun(16, "int4", GROWS, 1.31, _SEED),
    LocalRun(16, "sparse_bits", EXACT_FIRST, 1.96, _RACE),
    LocalRun(16, "sparse_bits", NO_START, 5.78, _SEED),
    LocalRun(4, "", NO_START, 1.33, _LOCAL, "average"),
    LocalRun(16, "", NO_START, 1.36, _LOCAL, "average"),
    LocalRun(64, "", NO_START, 1.42, _LOCAL, "average"),
    LocalRun(16, "", EXACT_FIRST, 1.22, _LOCAL, "average"),
    LocalRun(16, "int4", NO_START, 1.36, _SEED, "average"),
    LocalRun(16, "int4", NO_START, 1.64, _SEED, "average", lags=True),
    LocalRun(64, "int4", NO_START, 1.41, _SEED, "average"),
    LocalRun(4, "sparse_bits", NO_START, 1.78, _SEED, "average"),
    LocalRun(16, "", NO_START, 1.37, _LOCAL, "slowmo"),
    LocalRun(64, "", NO_START, 1.62, _LOCAL, "slowmo"),
    LocalRun(16, "", EXACT_FIRST, 1.0, _LOCAL, "slowmo"),
    LocalRun(16, "", NO_START, 1.48, _LOCAL, "bmuf"),
    LocalRun(64, "", NO_START, 1.71, _LOCAL, "bmuf"),
)
# factor of a price if weights are under way for a round, and no such run was measured
LAG_TIMES = 1.88 / 1.45


def start_of(plan: Plan) -> str:
    """Return how a run with local steps begins, as the table has it."""
    assert plan.outer is not None
    if plan.outer.warmup_steps:
        return EXACT_FIRST
    return GROWS if plan.outer.grows else NO_START


def local_price(plan: Plan, codec: str = "") -> LearningPrice | None:
    """Return the price of the run that is most like a plan; None if there is none with its codec.

    Args:
        plan: a plan with local steps.
        codec: the codec of its rounds.

    Examples:
        >>> from shoal.core.outer_step import Outer
        >>> from shoal.core.plan import Choice, Plan
        >>> from shoal.planner.local_prices import local_price
        >>> choices = (Choice("fc", "replicate", "direct"),)
        >>> plan = Plan(2, "", choices, 1 << 20, lanes=3, local_steps=16, outer=Outer())
        >>> local_price(plan).times
        1.37
    """
    assert plan.outer is not None
    rule, lags = plan.outer.rule, bool(plan.outer.lag)
    like = [run for run in RUNS if run.rule == rule and run.codec == codec]
    for start in (start_of(plan), NO_START):
        begun = [run for run in like if run.start == start]
        if begun:
            longest = max(run.length for run in begun)
            enough = [run for run in begun if run.length >= min(plan.local_steps, longest)]
            run = min(enough, key=lambda run: (run.length, run.lags != lags))
            dearer = LAG_TIMES if lags and not run.lags else 1.0
            return LearningPrice(dearer * run.times, f"{run.source}, H = {run.length}")
    return None
