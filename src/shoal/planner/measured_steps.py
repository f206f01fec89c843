"""Compares measured training with a plan's prediction, and corrects the facts to fit both.

compute      forward and backward of the slowest rank: all its layers count as equally slower
optimizer    likewise
exchanges    the main thread's wait for them; links are tried by themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.contracts.strategy import Strategy
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.outcome import (
    BETWEEN,
    COMPUTE,
    EXCHANGES,
    OPTIMIZER,
    Outcome,
    Spending,
    Term,
    of_slowest,
)
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.planner.imagined_hosts import at_rate, stretch
from shoal.planner.timeline import Predictor, with_settings_of

# limits on how many times as long, or as short, as predicted compute and links may be taken to be
_MOST, _MOST_LINK = 8.0, 1e6
_LEAST_PART = 0.01  # share of the predicted step below which a ratio means nothing
_SAME_LINK = 0.1  # relative difference of rates up to which two links are the same


def has_terms(plan: Plan) -> bool:
    """Return whether a prediction's terms describe its main thread in every step."""
    roles = [named(Strategy, choice.strategy).role for choice in plan.choices]
    elsewhere = any(role.runs_elsewhere or role.has_tables for role in roles)
    return plan.in_step and not plan.periods and not elsewhere


def outcome_of(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    ranks: Sequence[Spending],
    links: tuple[float, float] | None = None,
) -> Outcome | None:
    """Compare a plan's prediction with the time that ranks have spent.

    Return None if a rank has measured no step.

    Args:
        plan: the plan that the model follows.
        profile: the profile by which it was predicted.
        cluster: the cluster by which it was predicted.
        ranks: the time that each rank's main thread spends, by rank; or one rank's.
        links: as in `Outcome`.
    """
    if not ranks or not all(spending.steps for spending in ranks):
        return None
    spent, slowest = of_slowest(list(ranks))
    measured_s = spent.compute_s + spent.waiting_s + spent.optimizer_s
    steps = min(spending.steps for spending in ranks)
    if not has_terms(plan):
        return Outcome(plan.predicted_s, measured_s, steps, slowest=slowest, links=links)
    timeline = Predictor(with_settings_of(profile, plan), cluster).as_is(plan)
    terms = (
        Term(COMPUTE, timeline.computed_s, spent.compute_s),
        Term(EXCHANGES, timeline.exposed_s, spent.waiting_s),
        Term(OPTIMIZER, timeline.optimizer_s, spent.optimizer_s),
        Term(BETWEEN, 0.0, spent.between_s),
    )
    longest = spent.longest, spent.longest_s
    return Outcome(timeline.step_s, measured_s, steps, terms, longest, slowest, links)


def correct_facts(
    profile: ModelProfile, cluster: Cluster, outcome: Outcome
) -> tuple[ModelProfile, Cluster]:
    """Correct the facts by the measured step, so that they would predict it."""
    compute = _times(outcome.term(COMPUTE), outcome.predicted_s)
    optimizer = _times(outcome.term(OPTIMIZER), outcome.predicted_s)
    profile = replace(
        stretch(profile, compute),
        optimizer_s=profile.optimizer_s * optimizer,
        update=profile.update.times(optimizer),
    )
    if outcome.links is not None:
        then, now = outcome.links
        if abs(now - then) > _SAME_LINK * then:
            cluster = at_rate(cluster, min(max(now / then, 1 / _MOST_LINK), _MOST_LINK))
    return profile, cluster


def _times(term: Term, step_s: float) -> float:
    """Return how many times as long as predicted a term takes."""
    if min(term.predicted_s, term.measured_s) < _LEAST_PART * step_s:
        return 1.0
    return min(max(term.measured_s / term.predicted_s, 1 / _MOST), _MOST)
