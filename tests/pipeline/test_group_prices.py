"""Prices of groups, and the sizes that the planner chooses for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_models import Gpt
from test_prices import EACH_S, profiled

import shoal
from shoal.core.errors import PlanError
from shoal.core.facts import ModelProfile
from shoal.core.rank_groups import RankGroups
from shoal.pipeline.group_prices import step_of_groups, traffic_in_groups
from shoal.planner.explain import explain
from shoal.planner.plan_details import plan_for

PAIRS, APART = ("a", "a", "b", "b"), ("a", "b", "c", "d")
LAYERS = 6 * 6 + 4  # of six blocks, the tables, the last norm and the head


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profiled(Gpt(blocks=6))


def cluster(hosts: tuple[str, ...], rate: float, **more: Any) -> shoal.Cluster:
    return shoal.Cluster(shoal.Topology(hosts), shoal.Link(0.0, rate), **more)


def test_no_group_has_a_host_without_rows() -> None:
    with pytest.raises(PlanError, match="a host that brings no rows is in a group"):
        RankGroups.of([(0, 5), (1, 2)], 4)


def halves(profile: ModelProfile) -> dict[str, tuple[int, ...]]:
    order = sorted(profile.layers, key=lambda layer: layer.needed_s)
    held = [(0, 1)] * (LAYERS // 2) + [(2, 3)] * (LAYERS // 2)
    return dict(zip([layer.name for layer in order], held, strict=True))


def groups_of(plan: shoal.Plan) -> set[tuple[int, ...]]:
    return {choice.group for choice in plan.choices}


def test_a_replica_takes_the_time_of_a_pipeline_of_its_own_ranks(profile: ModelProfile) -> None:
    groups = RankGroups(((0, 1), (2, 3)), 4)
    forward_s, backward_s = step_of_groups(
        profile.layers, halves(profile), groups, cluster(PAIRS, 1e15)
    )
    assert forward_s == pytest.approx(3 * LAYERS / 2 * EACH_S)  # 2 stations, 2 micro-batches
    assert backward_s == pytest.approx(2 * forward_s, rel=1e-3)


def test_the_mean_of_the_first_group_is_waited_for_over_its_own_link(profile: ModelProfile) -> None:
    groups, held = RankGroups(((0, 1), (2, 3)), 4), halves(profile)
    first_bytes = sum(layer.nbytes for layer in profile.layers if held[layer.name] == (0, 1))
    profile = replace(profile, layers=tuple(replace(layer) for layer in profile.layers))
    one_host, other = (
        step_of_groups(profile.layers, held, groups, cluster(hosts, 1e6))[1]
        for hosts in (PAIRS, APART)
    )
    sent = 2 * first_bytes / 2
    assert other - one_host == pytest.approx(sent / 1e6 - sent * 1e-9)


def test_bytes_are_those_of_crossings_and_of_means(profile: ModelProfile) -> None:
    groups, held = RankGroups(((0, 1), (2, 3)), 4), halves(profile)
    there, back = traffic_in_groups(profile.layers, held, groups, cluster(PAIRS, 1e6))
    first_bytes = sum(layer.nbytes for layer in profile.layers if held[layer.name] == (0, 1))
    assert there.sent[0] == there.sent[1] == there.received[2] > 0 == there.sent[2]
    assert back.sent[0] == pytest.approx(first_bytes)  # half of the ring's bytes are foreign
    assert back.leaving is not None and back.leaving[0] == 0 < back.leaving[2] < back.sent[2]


def test_the_planner_takes_groups_of_the_ranks_of_a_host(profile: ModelProfile) -> None:
    pipeline = plan_for(profile, cluster(PAIRS, 1e5), strategies=["pipeline"])
    assert groups_of(pipeline) == {(0, 1), (2, 3)}
    alone = plan_for(profile, cluster(PAIRS, 1e5), pins={"*": "pipeline"})
    assert groups_of(alone) == {(0,), (1,), (2,), (3,)}
    assert pipeline.predicted_s < 0.95 * alone.predicted_s
    stations = explain(pipeline, profile, cluster(PAIRS, 1e5)).step.stations
    assert [each.rank for each in stations] == ["ranks 0, 1 (a)", "ranks 2, 3 (b)"]
    assert shoal.Plan.from_json(pipeline.to_json()) == pipeline


@pytest.mark.parametrize(
    "change",
    [
        {"topology": shoal.Topology(("a", "a", "a", "b"))},
        {"topology": shoal.Topology(APART)},
    ],
    ids=["unlike hosts", "a slow link between all"],
)
def test_the_planner_takes_no_groups(profile: ModelProfile, change: dict[str, Any]) -> None:
    there = replace(cluster(PAIRS, 1e5), **change)
    plan = plan_for(profile, there, strategies=["pipeline"])
    assert all(len(group) == 1 for group in groups_of(plan))
