"""Steps of earlier runs correct the choice of a plan, beyond what they are sure of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.core.errors import PlanError
from shoal.core.plan import Choice, Plan
from shoal.planner.experience import SAME, SURE, Experience, Experiences, prefer
from shoal.planner.simpler_plans import KINDS

pytestmark = pytest.mark.quick

ALL_REDUCE, OWNERS, CUTS, PIPELINE = KINDS
WAYS = {ALL_REDUCE: "replicate", OWNERS: "sliced", CUTS: "row", PIPELINE: "pipeline"}


def plan(kind: str, seconds: float) -> Plan:
    return Plan(2, "digest", (Choice("layer", WAYS[kind]),), 1 << 20, 1, predicted_s=seconds)


class Searches:
    """A search over one plan a kind, as the planner would find them."""

    def __init__(self, **seconds: float) -> None:
        self.plans = [plan(kind, s) for kind, s in zip(KINDS, seconds.values(), strict=False)]

    def __call__(self, kinds: Sequence[str]) -> Plan:
        allowed = self.plans[: len(kinds)]
        if not allowed:
            raise PlanError("there is none")
        return min(allowed, key=lambda each: each.predicted_s)


SEARCH = Searches(all_reduce=1.0, owners=0.9, cuts=0.8, pipeline=0.6)
BEST = SEARCH(KINDS)


def run(predicted_s: float, measured_s: float, compute_s: float = 0.0) -> Experience:
    return Experience(predicted_s, measured_s, compute_s, 32)


def test_nothing_is_known_so_the_best_plan_is_taken() -> None:
    assert prefer(BEST, Experiences({}), SEARCH) == (BEST, "")


def test_a_kind_that_took_twice_as_long_gives_way_to_the_next_one() -> None:
    taken, why = prefer(BEST, Experiences({PIPELINE: run(0.6, 1.2)}), SEARCH)
    assert taken.predicted_s == 0.8 and CUTS in why and "2.00 times" in why


@pytest.mark.parametrize("before", [0.6 / SAME, 0.6 * SAME])
def test_a_prediction_from_other_figures_says_nothing(before: float) -> None:
    """As after an earlier run on a busy machine, or with a slower link."""
    beyond = before * (0.99 if before < 0.6 else 1.01)
    assert prefer(BEST, Experiences({PIPELINE: run(beyond, 2 * beyond)}), SEARCH) == (BEST, "")
    within = before * (1.01 if before < 0.6 else 0.99)
    taken, why = prefer(BEST, Experiences({PIPELINE: run(within, 2 * within)}), SEARCH)
    assert taken.predicted_s == 0.8 and "2.00 times" in why


def test_another_kind_is_not_corrected_by_a_prediction_from_other_figures() -> None:
    known = {PIPELINE: run(0.6, 0.6), CUTS: run(8.0, 0.8)}
    assert prefer(BEST, Experiences(known), SEARCH)[0] is BEST


def test_a_lead_within_the_uncertainty_changes_nothing() -> None:
    just = 0.8 / (1 - SURE)
    taken, why = prefer(BEST, Experiences({PIPELINE: run(0.6, 0.99 * just)}), SEARCH)
    assert taken is BEST and "are expected" in why
    taken, _ = prefer(BEST, Experiences({PIPELINE: run(0.6, 1.01 * just)}), SEARCH)
    assert taken.predicted_s == 0.8


def test_a_busy_processor_slows_every_kind_alike() -> None:
    """The pipeline took 0.6 s longer than predicted, all of it compute: others would, too."""
    taken, _ = prefer(BEST, Experiences({PIPELINE: run(0.6, 1.2, compute_s=0.6)}), SEARCH)
    assert taken is BEST


def test_of_two_kinds_that_were_run_the_faster_one_is_taken() -> None:
    known = {PIPELINE: run(0.6, 1.2), CUTS: run(0.8, 1.6), OWNERS: run(0.9, 0.9)}
    taken, _ = prefer(BEST, Experiences(known), SEARCH)
    assert taken.predicted_s == 0.9


def test_a_kind_that_was_faster_than_predicted_comes_back() -> None:
    search = Searches(all_reduce=0.6, owners=0.7, cuts=0.7, pipeline=0.7)
    best = search(KINDS)
    known = {ALL_REDUCE: run(0.6, 0.6), PIPELINE: run(0.7, 0.3)}
    # the search among all kinds finds the all-reduce again, because it is predicted to be faster
    assert prefer(best, Experiences(known), search)[0] is best


def test_a_resumed_run_keeps_the_kind_of_the_run_before() -> None:
    known = {PIPELINE: run(0.6, 3.0)}
    assert prefer(BEST, Experiences(known, PIPELINE), SEARCH, resumes=True) == (BEST, "")
    taken, why = prefer(BEST, Experiences(known, OWNERS), SEARCH, resumes=True)
    assert (taken.predicted_s, why) == (0.9, "")
    assert prefer(BEST, Experiences(known, "older"), SEARCH, resumes=True)[0] is BEST


def test_a_kind_that_cannot_be_had_is_left_out() -> None:
    def search(kinds: Sequence[str]) -> Plan:
        raise PlanError("pins do not allow it")

    assert prefer(BEST, Experiences({PIPELINE: run(0.6, 6.0)}), search)[0] is BEST
