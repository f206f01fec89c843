"""Layers that are updated once in k steps: what a step sends of them on average."""

from __future__ import annotations

import pytest
from made_up import cluster, layer, model

from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.planner.plan_details import plan_for
from shoal.planner.search_options import SearchOptions
from shoal.planner.timeline import Predictor, with_settings_of

MB = 1_000_000
# 4 MB each; computing takes 3.5 s
NET = model(layer("late", 0.5, MB), layer("early", 2.0, MB))
ONE_BUCKET = SearchOptions(bucket_bytes=(1 << 30,))
SLOW = cluster(2, MB)


def planned(every: dict[str, int], **how: object) -> Plan:
    how = {"strategies": ["replicate"], "options": ONE_BUCKET} | how
    return plan_for(NET.updated(every), SLOW, **how)  # type: ignore[arg-type]


def sent(plan: Plan) -> list[float]:
    """Bytes of each bucket in a mean step, of one of two ranks: half there and half back."""
    return [c.traffic.worst for c in Predictor(with_settings_of(NET, plan), SLOW).costs(plan)]


def test_a_mean_step_has_a_part_of_its_bytes() -> None:
    assert sent(planned({})) == pytest.approx([8 * MB], rel=1e-3)
    plan = planned({"late": 4})
    assert plan.update_every == {"late": 4}
    assert sent(plan) == pytest.approx([4 * MB / 4, 4 * MB], rel=1e-3), "a bucket of its own"
    assert plan.predicted_s == pytest.approx(planned({}).predicted_s - 4, abs=0.1)


@pytest.mark.parametrize("strategy", ["replicate", "sliced"])
def test_memory_has_what_is_kept(strategy: str) -> None:
    every, seldom = (
        Predictor(NET.updated(often), SLOW).memory_bytes(
            planned(often, strategies=[strategy]).choices, 1 << 30, 3
        )
        for often in ({}, {"late": 4})
    )
    assert seldom - every == pytest.approx(4 * MB, rel=1e-3)


def test_other_strategies_are_left_out() -> None:
    plan = planned({"late": 4}, strategies=None)
    assert plan.choice("late").strategy in ("replicate", "sliced")
    with pytest.raises(PlanError, match="which goes with replicate, sliced only"):
        planned({"late": 4}, pins={"late": "factor"}, strategies=None)


def test_a_plan_is_saved_with_it() -> None:
    plan = planned({"late": 4})
    assert Plan.from_json(plan.to_json()) == plan
    for wrong in ('"late": 0', '"late": 2.5', '"late": "4"'):
        with pytest.raises(PlanError, match="from 1 to 512"):
            Plan.from_json(plan.to_json().replace('"late": 4', wrong))
