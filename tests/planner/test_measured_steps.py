"""What was measured stands beside what was predicted, term by term, and facts are put right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import cluster, layer, linear, model

from shoal.core.facts import ModelProfile
from shoal.core.outcome import BETWEEN, COMPUTE, EXCHANGES, OPTIMIZER, Spending
from shoal.core.outer_step import Outer
from shoal.core.plan import Plan
from shoal.planner.measured_steps import correct_facts, has_terms, outcome_of
from shoal.planner.search import predict_again, search
from shoal.planner.search_options import Constraints
from shoal.planner.timeline import Predictor, with_settings_of

pytestmark = pytest.mark.quick
PROFILE = model(layer("last", 0.5, 1 << 20), layer("first", 2.0, 1 << 24))
CLUSTER = cluster(4, 1e8)
CUT = model(linear("last", 0.5, 4096, 4096, rows=8, product_s=0.1), layer("first", 2.0, 1 << 20))


def plan_of(profile: ModelProfile = PROFILE, **pins: str) -> Plan:
    return search(profile, CLUSTER, Constraints(pins=pins or {"*": "replicate:direct"}))


def spent(plan: Plan, times: float = 1.0) -> Spending:
    """What the plan predicts, with compute so many times as long."""
    timeline = Predictor(with_settings_of(PROFILE, plan), CLUSTER).as_is(plan)
    return Spending(
        20, times * timeline.computed_s, timeline.exposed_s, timeline.optimizer_s, between_s=0.25
    )


def test_what_goes_as_predicted_is_off_by_nothing() -> None:
    plan = plan_of()
    found = outcome_of(plan, PROFILE, CLUSTER, [spent(plan)] * 4)
    assert found is not None
    assert found.measured_s == pytest.approx(found.predicted_s) and found.steps == 20
    assert [term.name for term in found.terms] == [COMPUTE, EXCHANGES, OPTIMIZER, BETWEEN]
    assert found.off is not None and found.off.off_s == pytest.approx(0.0, abs=1e-12)
    assert found.term(EXCHANGES).predicted_s > 0.1  # so that it is compared at all


@pytest.mark.parametrize("pins", [{"last": "column"}, {"last": "row"}, {"last": "replicate:ring"}])
def test_the_terms_of_a_prediction_add_up_to_its_step(pins: dict[str, str]) -> None:
    plan = plan_of(CUT, **pins)
    timeline = Predictor(with_settings_of(CUT, plan), CLUSTER).as_is(plan)
    parts = timeline.computed_s + timeline.exposed_s + timeline.optimizer_s
    assert parts == pytest.approx(timeline.step_s)
    crosses = pins["last"] in ("column", "row")
    assert (timeline.crossing_s > 0) == crosses


def test_a_rank_that_has_measured_nothing_gives_no_outcome() -> None:
    plan = plan_of()
    assert outcome_of(plan, PROFILE, CLUSTER, [spent(plan), Spending()]) is None


def test_workers_that_do_not_keep_step_have_no_terms() -> None:
    plan = plan_of()
    apart = replace(plan, local_steps=4, outer=Outer())
    assert has_terms(plan) and not has_terms(apart) and not has_terms(replace(plan, staleness=2))
    found = outcome_of(apart, PROFILE, CLUSTER, [spent(plan)])
    assert found is not None and not found.terms and found.measured_s > 0


def test_facts_that_were_put_right_predict_what_was_measured() -> None:
    plan = plan_of()
    found = outcome_of(plan, PROFILE, CLUSTER, [spent(plan, times=1.5)], links=(5e7, 4e7))
    assert found is not None
    profile, slower = correct_facts(PROFILE, CLUSTER, found)
    again = Predictor(with_settings_of(profile, plan), slower).as_is(plan)
    assert again.computed_s == pytest.approx(1.5 * found.term(COMPUTE).predicted_s, rel=0.01)
    assert again.optimizer_s == pytest.approx(found.term(OPTIMIZER).measured_s)
    assert slower.link.bytes_per_s == pytest.approx(0.8 * CLUSTER.link.bytes_per_s)


def test_links_that_carry_about_as_much_are_as_they_were() -> None:
    plan = plan_of()
    found = outcome_of(plan, PROFILE, CLUSTER, [spent(plan)], links=(5e7, 4.8e7))
    assert found is not None
    profile, same = correct_facts(PROFILE, CLUSTER, found)
    assert same == CLUSTER
    assert predict_again(plan, profile, same).predicted_s == pytest.approx(plan.predicted_s)
