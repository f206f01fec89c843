"""Chooses local steps where a loss is reached soonest by them: their length, codec and beginning.

    time to a loss of N exact steps   =   start  +  (times × N − steps of the start) × local step

Only ways that the race has measured are tried (local_prices.py): a length, a codec and a start.
They have the rule "nesterov". From random weights others cost as much. Going on from trained ones
averaging needed 1.7 times the samples, and "nesterov" no more than exact steps.

The start is nothing, N / 4 exact steps, or growing rounds, each of which waits for its exchange. A
lag hides the exchange, and has a price of its own, so rounds that wait are tried as well. A run
needs 7 rounds at least, as the measured ones had. Local steps must make the time to a loss a tenth
shorter than codecs do in each step. Guarded by tests/planner/test_local_ways.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.core.facts import Cluster, ModelProfile
from shoal.core.outer_step import Outer
from shoal.core.plan import Plan
from shoal.planner.learning import price_of, seconds_to_a_loss
from shoal.planner.local import exchange_of, with_local_steps
from shoal.planner.local_prices import EXACT_FIRST, GROWS, RUNS, WARM_SHARE, LocalRun
from shoal.planner.lossy_plans import WORTH
from shoal.planner.timeline import Predictor

STEPS = 448  # steps of a run if its caller gives no number: those of the measured runs
_FEWEST_ROUNDS = 7  # rounds of the shortest measured runs
_NOTHING_TO_GAIN = 0.05  # share of the step that is no compute


@dataclass(frozen=True)
class LocalWay:
    """A way to train by local steps.

    Args:
        plan: the plan, with its start.
        seconds: the whole run's seconds, divided by the exact steps that it is worth.
    """

    plan: Plan
    seconds: float


def soonest(
    plan: Plan,
    replicated: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    total_steps: int | None = None,
) -> Plan:
    """Return a plan with local steps if a loss is reached a tenth sooner; else the given plan.

    Args:
        plan: the plan that exchanges values in each step, with codecs or without.
        replicated: a plan that replicates every layer, exactly.
        profile: the model.
        cluster: the ranks, with the times of the codecs that may be used.
        total_steps: exact steps that the run would have; None if nobody knows: then `STEPS`.
    """
    ways = local_ways(replicated, profile, cluster, total_steps or STEPS)
    if not ways:
        return plan
    best = min(ways, key=lambda way: way.seconds)
    return best.plan if best.seconds < (1 - WORTH) * seconds_to_a_loss(plan) else plan


def has_nothing_to_gain(plan: Plan, profile: ModelProfile) -> bool:
    """Return whether a plan's step is nearly all compute, so that fewer exchanges gain nothing."""
    compute_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    return seconds_to_a_loss(plan) <= (1 + _NOTHING_TO_GAIN) * compute_s


def local_ways(
    replicated: Plan, profile: ModelProfile, cluster: Cluster, total_steps: int
) -> list[LocalWay]:
    """Return the measured ways that a run of so many exact steps may take, each with its seconds.

    Args:
        replicated: a plan that replicates every layer, exactly.
        profile: the model.
        cluster: the ranks, with the times of the codecs that may be used.
        total_steps: exact steps of the run.
    """
    predictor = Predictor(profile, cluster)
    # exchanges of two halves carry codes
    halves = with_local_steps(replicated, profile, cluster, 1, Outer(lag=0)).choices
    split = replace(replicated, choices=halves)
    found = []
    for run in dict.fromkeys(replace(run, times=1.0, source="", lags=False) for run in RUNS):
        if run.rule != Outer.rule:
            continue
        is_long = total_steps >= _FEWEST_ROUNDS * run.length
        if is_long and (not run.codec or run.codec in cluster.codings):
            for lag in (0, None):  # rounds that wait, and a lag where the link is slow
                plan = _make_plan(split, run, lag, profile, cluster, total_steps)
                found.append(LocalWay(plan, _seconds(plan, predictor, cluster, total_steps)))
    return found


def _make_plan(
    split: Plan,
    run: LocalRun,
    lag: int | None,
    profile: ModelProfile,
    cluster: Cluster,
    total_steps: int,
) -> Plan:
    """Return the plan of a measured way."""
    first = total_steps // WARM_SHARE if run.start == EXACT_FIRST else 0
    outer = Outer(rule=run.rule, lag=lag, warmup_steps=first, grows=run.start == GROWS)
    outer = outer.on(cluster.topology)
    codec = f"+{run.codec}" if run.codec else ""
    choices = tuple(replace(choice, exchange=choice.exchange + codec) for choice in split.choices)
    coded = replace(split, choices=choices)
    return with_local_steps(coded, profile, cluster, run.length, outer)


def _seconds(plan: Plan, predictor: Predictor, cluster: Cluster, total_steps: int) -> float:
    """Return the seconds of a whole run, for each exact step that it is worth."""
    outer = plan.outer
    assert outer is not None
    made, start_s = outer.warmup_steps, 0.0
    if made:
        exact = tuple(choice.without_codec() for choice in plan.choices)
        bare = replace(plan.without_local_steps(), choices=exact)
        start_s += made * predictor.as_is(bare).step_s
    if outer.grows:  # rounds of 1, 2, 4 steps wait for their exchanges
        start_s += math.ceil(math.log2(plan.local_steps)) * exchange_of(plan, predictor, cluster)[0]
    left = max(0.0, price_of(plan).times * total_steps - made)
    return (start_s + left * plan.predicted_s) / total_steps
