"""Corrects the choice of a plan by the steps of earlier runs, as measured and as predicted.

    1  keep     a run keeps, for the kind of its plan, seconds of a step as predicted and as
                measured (features/experience.py)
    2  correct  the next start of the same job multiplies predictions of that kind by their ratio
    3  choose   another kind is taken if it is then ahead by more than `SURE` of the step

An experience counts for a plan only if it had about the same prediction. With other links, or times
that were measured on a busier machine, its ratio says nothing about the present prediction.

A kind that was never run is taken to be as far off as the compute was, because a busy processor
slows every plan alike. Guarded by tests/planner/test_experience.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.contracts.versions import versions
from shoal.core import cache_folder
from shoal.core.errors import PlanError
from shoal.core.facts import ModelProfile, Topology
from shoal.core.outcome import COMPUTE, OPTIMIZER, Outcome
from shoal.core.plan import Plan
from shoal.planner.simpler_plans import KINDS, kind_of

SURE = 0.1  # share of the step by which another plan must be ahead
SAME = 1.5  # predictions of one plan that differ by more than this factor are of other figures
_KEPT = "steps"  # the first part of the file's name
Search = Callable[[Sequence[str]], Plan]


@dataclass(frozen=True)
class Experience:
    """Steps of an earlier run, and the predictions of its kind of plan.

    Args:
        predicted_s: predicted seconds of a step.
        measured_s: measured seconds of a step, the mean of the middle half.
        compute_s: seconds by which compute and update took longer than predicted.
        steps: number of measured steps.

    Examples:
        >>> Experience(predicted_s=0.5, measured_s=0.7, compute_s=0.1, steps=32).ratio
        1.4
    """

    predicted_s: float
    measured_s: float
    compute_s: float = 0.0
    steps: int = 0

    @property
    def ratio(self) -> float:
        """Measured ÷ predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else 1.0

    def is_of(self, plan: Plan) -> bool:
        """Return whether its prediction is about the one of a plan, so that its ratio holds."""
        return self.predicted_s <= SAME * plan.predicted_s <= SAME * SAME * self.predicted_s

    @classmethod
    def from_outcome(cls, outcome: Outcome) -> Experience:
        over_s = sum(outcome.term(name).off_s for name in (COMPUTE, OPTIMIZER))
        return cls(outcome.predicted_s, outcome.measured_s, max(0.0, over_s), outcome.steps)


@dataclass(frozen=True)
class Experiences:
    """All experiences of a job's earlier runs.

    Args:
        kinds: by the kind of the plan.
        taken: the kind of the newest run's plan, which a resumed run goes on with.
    """

    kinds: dict[str, Experience]
    taken: str = ""


def experiences(
    profile: ModelProfile, topology: Topology, say: Callable[[str], None]
) -> Experiences:
    """Return the experiences of a job's earlier runs."""
    entry = cache_folder.read(_KEPT, _key(profile, topology), Experiences, say)
    return Experiences({}) if entry is None else entry.value


def keep(
    plan: Plan,
    profile: ModelProfile,
    topology: Topology,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    """Keep the outcome of a run for the next start of the same job."""
    if not (outcome.terms and outcome.predicted_s > 0 and outcome.measured_s > 0):
        return
    kind, known = kind_of(plan), experiences(profile, topology, say)
    kinds = {**known.kinds, kind: Experience.from_outcome(outcome)}
    cache_folder.write(_KEPT, _key(profile, topology), Experiences(kinds, kind), say)


def prefer(
    best: Plan, earlier: Experiences, search: Search, *, resumes: bool = False
) -> tuple[Plan, str]:
    """Return the plan to take by measurements of earlier runs, and a line to be said.

    Args:
        best: the plan that is predicted to be the fastest.
        earlier: experiences of earlier runs.
        search: searches for the best plan of the kinds that it is given, the simplest first; a
            PlanError says that there is none.
        resumes: whether a run goes on from a checkpoint: then it takes a plan of the same kind as
            the newest run, whatever was measured.
    """
    known = earlier.kinds
    if resumes:
        return _of_kind(earlier.taken, best, search), ""
    own = known.get(kind_of(best))
    if own is None or not own.is_of(best):
        return best, ""
    expected_s = _corrected_s(best, known, own)
    chosen, chosen_s = best, (1 - SURE) * expected_s
    for plan in _others(best, known, search):
        other_s = _corrected_s(plan, known, own)
        if other_s < chosen_s:
            chosen, chosen_s = plan, other_s
    took = f"steps of an earlier run took {own.ratio:.2f} times as long as predicted"
    if chosen is best:
        return best, f"{took}, so {expected_s:.3g} s are expected"
    return chosen, (
        f"{took} ({kind_of(best)}: {expected_s:.3g} s), so the plan has {kind_of(chosen)} now: "
        f"{chosen_s:.3g} s are expected"
    )


def _of_kind(kind: str, best: Plan, search: Search) -> Plan:
    """Return the best plan of a kind; the best of all if there is none."""
    if kind in KINDS and kind != kind_of(best):
        try:
            plan = search(KINDS[: KINDS.index(kind) + 1])
        except PlanError:
            return best
        return plan if kind_of(plan) == kind else best
    return best


def _others(best: Plan, known: Mapping[str, Experience], search: Search) -> Iterable[Plan]:
    """Return the best plans of other kinds that may be ahead."""
    own = KINDS.index(kind_of(best))
    for level in range(len(KINDS)):
        if level < own or (level > own and KINDS[level] in known):
            try:
                yield search(KINDS[: level + 1])
            except PlanError:  # pins, or a limit of memory, do not allow it
                continue


def _corrected_s(plan: Plan, known: Mapping[str, Experience], own: Experience) -> float:
    """Return the seconds that a step of a plan is expected to take."""
    of_kind = known.get(kind_of(plan))
    if of_kind is None or not of_kind.is_of(plan):
        return plan.predicted_s + own.compute_s
    return plan.predicted_s * of_kind.ratio


def _key(profile: ModelProfile, topology: Topology) -> str:
    rows = sum(layer.rows for layer in profile.layers)
    return json.dumps([versions().shoal, profile.digest, topology.hosts, rows])
