"""What training has measured beside what a plan predicts, and facts that both fit.

compute      forward and backward of the slowest rank: its layers are taken to be slower alike
optimizer    likewise
exchanges    what the main thread waits for them; links are tried by themselves
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
from shoal.planner.imagined import at_rate, stretched
from shoal.planner.timeline import Predictor, as_planned

# times as long, or as short, as was predicted, of compute and of links: more is taken to be so much
_MOST, _MOST_LINK = 8.0, 1e6
_LEAST_PART = 0.01  # of the predicted step: of less, a ratio says nothing
_SAME_LINK = 0.1  # of its rate: links that differ by less are the same


def has_terms(plan: Plan) -> bool:
    """Whether a prediction's terms are those of its main thread, in every step."""
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
    """A plan's prediction beside what ranks have spent; None where one has measured no step.

    Args:
        plan: that the model follows.
        profile: by which it was predicted.
        cluster: likewise.
        ranks: what each rank's main thread spends, by rank; or that of one.
        links: as in `Outcome`.
    """
    if not ranks or not all(spending.steps for spending in ranks):
        return None
    spent, slowest = of_slowest(list(ranks))
    measured_s = spent.compute_s + spent.waiting_s + spent.optimizer_s
    steps = min(spending.steps for spending in ranks)
    if not has_terms(plan):
        return Outcome(plan.predicted_s, measured_s, steps, slowest=slowest, links=links)
    timeline = Predictor(as_planned(profile, plan), cluster).as_is(plan)
    terms = (
        Term(COMPUTE, timeline.computed_s, spent.compute_s),
        Term(EXCHANGES, timeline.exposed_s, spent.waiting_s),
        Term(OPTIMIZER, timeline.optimizer_s, spent.optimizer_s),
        Term(BETWEEN, 0.0, spent.between_s),
    )
    longest = spent.longest, spent.longest_s
    return Outcome(timeline.step_s, measured_s, steps, terms, longest, slowest, links)


def corrected(
    profile: ModelProfile, cluster: Cluster, outcome: Outcome
) -> tuple[ModelProfile, Cluster]:
    """The facts, with what was measured in place of what was predicted by them."""
    compute = _times(outcome.term(COMPUTE), outcome.predicted_s)
    optimizer = _times(outcome.term(OPTIMIZER), outcome.predicted_s)
    profile = replace(
        stretched(profile, compute),
        optimizer_s=profile.optimizer_s * optimizer,
        update=profile.update.times(optimizer),
    )
    if outcome.links is not None:
        then, now = outcome.links
        if abs(now - then) > _SAME_LINK * then:
            cluster = at_rate(cluster, min(max(now / then, 1 / _MOST_LINK), _MOST_LINK))
    return profile, cluster


def _times(term: Term, step_s: float) -> float:
    """How many times as long as predicted a term takes."""
    if min(term.predicted_s, term.measured_s) < _LEAST_PART * step_s:
        return 1.0
    return min(max(term.measured_s / term.predicted_s, 1 / _MOST), _MOST)
