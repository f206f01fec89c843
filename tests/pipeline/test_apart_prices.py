"""Prices of hosts that hold the end of a model and bring no rows, and plans that choose them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from small_models import Gpt
from test_prices import cluster, profiled

import shoal
from shoal.core.facts import ModelProfile, MovingState
from shoal.pipeline.prices import Front, RowPassage, stations_of, step_of, traffic_of
from shoal.pipeline.uses import LayerUse
from shoal.planner.apart_plans import ends_of
from shoal.planner.explain import explain
from shoal.planner.plan_details import plan_for
from shoal.planner.timeline import Predictor


@cache
def small() -> ModelProfile:
    return profiled(Gpt(blocks=2))


HOST = stations_of([LayerUse("end", 1.0, 2.0, 3.0, {})], {"end": 2})
FRONT = Front(forward_s=4.0, backward_s=8.0)


def with_hosts(count: int, **more: Any) -> shoal.Cluster:
    return replace(cluster(2, **more), tail=tuple(f"t{number}" for number in range(count)))


def test_rows_cross_from_the_front_to_the_first_host_and_back() -> None:
    """Bytes of both ranks go over the host's one link: 3 seconds each."""
    forward_s, backward_s = step_of(HOST, with_hosts(1, rate=1.0), front=FRONT)
    assert forward_s == pytest.approx(2 * 3.0 + 1.0)  # the last rank's rows come, and are computed
    assert backward_s == pytest.approx(2 * 3.0 + 3.0)
    fast_s = step_of(HOST, with_hosts(1, rate=1e12), front=FRONT)
    assert fast_s == pytest.approx((2 * 1.0, 2 * 2.0))


def test_a_front_and_a_host_work_at_once_on_parts() -> None:
    """When the last part of the first rank comes, the host has done its others."""
    fast = with_hosts(1, rate=1e12)
    whole_s, back_s = step_of(HOST, fast, RowPassage(1), FRONT)
    parts_s, parts_back_s = step_of(HOST, fast, RowPassage(4), FRONT)
    assert parts_s == pytest.approx(whole_s - 3 / 4 * 1.0)
    assert parts_back_s == pytest.approx(back_s - 3 / 4 * 2.0)


def test_each_rank_sends_its_rows_and_gets_gradients_back() -> None:
    traffic = traffic_of(HOST, 3, rows=2)
    assert traffic.sent == (3.0, 3.0, 0.0) and traffic.received == (0.0, 0.0, 6.0)
    assert traffic_of(HOST, 3, RowPassage(sent=0.5), rows=2).sent == (1.5, 1.5, 0.0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_planner_gives_an_end_to_hosts_where_it_pays(hosts: int) -> None:
    profile, slow = small(), with_hosts(hosts, rate=1e4)
    plan = plan_for(profile, slow, strategies=["replicate", "pipeline"])
    held = {c.layer: c.holder for c in plan.choices if c.strategy == "pipeline"}
    assert held and "words" not in held and set(held.values()) <= set(range(2, 2 + hosts))
    without = plan_for(profile, replace(slow, tail=()), strategies=["replicate"])
    assert plan.predicted_s < without.predicted_s
    stations = explain(plan, profile, slow, alternatives=False).step.stations
    assert [station.rank for station in stations][:1] == ["rank 2 (t0)"]
    assert stations[0].sent_bytes > 0


def test_hosts_are_idle_where_their_link_costs_more() -> None:
    profile = small()
    late = shoal.Link(latency_s=10.0, bytes_per_s=1e9)
    plan = plan_for(profile, replace(with_hosts(1), link=late), pins={"*": "replicate"})
    assert {choice.strategy for choice in plan.choices} == {"replicate"}
    free = plan_for(
        profile, replace(with_hosts(1), link=late), strategies=["replicate", "pipeline"]
    )
    assert free.predicted_s <= plan.predicted_s


@pytest.mark.parametrize(
    "state", [{"local": ("blocks.0.x",)}, {"moving": (MovingState("(loss)x", 1, 4, "mean"),)}]
)
def test_state_that_hosts_cannot_keep_leaves_layers_with_the_ranks(state: Any) -> None:
    profile = small()
    assert [*ends_of(Predictor(profile, with_hosts(1)), "pipeline")]
    assert not [*ends_of(Predictor(replace(profile, **state), with_hosts(1)), "pipeline")]


def test_a_buffer_between_ranks_and_hosts_forbids_this_end() -> None:
    """All of a block goes to one host, or none of it."""
    profile = small()
    moving = (MovingState("blocks.1.count", 1, 4, "mean"),)
    found = [*ends_of(Predictor(replace(profile, moving=moving), with_hosts(1)), "pipeline")]
    kept = [{name for name in end if name.startswith("blocks.1")} for end in found]
    assert {len(each) for each in kept} == {0, len(max(kept, key=len))}
