"""Prices of pipelines, and the ranks that layers are dealt to."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any
from weakref import ref

import pytest
import torch
from small_models import LENGTH, WIDTH, WORDS, Gpt, of_words, words
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.cost import Pace, Price
from shoal.core.errors import PlanError
from shoal.core.facts import LayerProfile, ModelProfile, UpdatePace
from shoal.core.foresight import BUBBLE, COMPUTE, Network, Question
from shoal.pipeline.absent_tensors import Forms
from shoal.pipeline.prices import RowPassage, StationWork, passage_s, stations_of, step_of
from shoal.pipeline.record import recorded
from shoal.pipeline.uses import LayerUse, uses_of
from shoal.planner.explain import explain
from shoal.planner.holders import holders_of, unasked_holders
from shoal.planner.learning import seconds_to_a_loss
from shoal.planner.plan_details import plan_for
from shoal.planner.search import predict_again
from shoal.planner.timeline import Predictor
from shoal.profiling.layers import complete_profile, profile_model
from shoal.strategies.row_parts import RowFacts
from shoal_tools.simulate import simulate

ROWS, EACH_S = 4, 0.001
RESIDUAL = ROWS * LENGTH * WIDTH * 4  # bytes


def cluster(ranks: int, rate: float = 1e9, cores: float = 1.0, **more: Any) -> shoal.Cluster:
    hosts = shoal.Topology(tuple(f"h{rank}" for rank in range(ranks)))
    return shoal.Cluster(hosts, shoal.Link(0.0, rate), cores_per_rank=cores, **more)


@pytest.mark.parametrize(("stations", "micro_batches"), [(2, 2), (4, 4), (4, 8), (3, 1)])
def test_bubble_is_that_of_the_formula(stations: int, micro_batches: int) -> None:
    works = [StationWork(rank, 1.0) for rank in range(stations)]
    took_s = passage_s(works, micro_batches, cluster(stations))
    bubble = (stations - 1) / (micro_batches + stations - 1)
    assert took_s * (1 - bubble) == pytest.approx(micro_batches)


def test_ranks_on_shared_cores_take_turns() -> None:
    works = [StationWork(rank, 1.0) for rank in range(4)]
    # 1, 2, 3, 4, 3, 2, 1 ranks compute at once, two of them at full speed
    assert passage_s(works, 4, cluster(4, cores=0.5)) == pytest.approx(
        1 + 1 + 1.5 + 2 + 1.5 + 1 + 1
    )
    assert passage_s(works, 4, cluster(4, cores=0.5, steady=True)) == pytest.approx(7)


def test_a_slow_link_is_a_station_too() -> None:
    works = [StationWork(0, 1.0, 3.0), StationWork(1, 1.0)]
    assert passage_s(works, 4, cluster(2, rate=1.0)) == pytest.approx(1 + 4 * 3 + 1)


def test_short_work_behind_a_crossing_that_takes_years_ends() -> None:
    works = [StationWork(0, 1e-5, 1e15), StationWork(1, 1e-5)]
    assert passage_s(works, 4, cluster(2, rate=1e5)) == pytest.approx(4e10)


def test_messages_sums_of_gradients_and_meetings_have_their_seconds() -> None:
    """Two even stations of one second each way, in one and in two parts of each rank's rows."""
    uses = [LayerUse(name, 1.0, 1.0, 1e-9, {0: 0.0}, gradient_bytes=8.0) for name in "ab"]
    moves = Pace(Price(0.5, 0.0), Price(0.2, 0.0))
    there = cluster(2, moves=moves, pack_byte_s=0.01)
    stations = stations_of(uses, {"a": 0, "b": 1})
    message_s = 2 * 0.2 / 2  # flags and values; a move of two ranks is one message each way
    sum_s = 8.0 * 0.01 * 1.5
    forward_s, backward_s = step_of(stations, there)
    assert forward_s == pytest.approx(5 * 0.5 + 3 * (1 + message_s))
    assert backward_s == pytest.approx(0.5 + 3 * (1 + message_s + sum_s))
    _, in_parts_s = step_of(stations, there, RowPassage(2))
    assert in_parts_s == pytest.approx(0.5 + 5 * (0.5 + message_s + 8.0 * 0.01 * 2))


def test_the_median_rank_says_how_much_slower_parts_are() -> None:
    """The least of noisy ranks was 0 nearly always, so that many parts seemed to be free."""
    ranks = [RowFacts("", (("call", (True,)),), 4, added) for added in (0.0, 0.02, 0.3)]
    assert RowFacts.of_ranks(ranks).added == 0.02


def test_a_rank_with_two_stations_takes_one_after_the_other() -> None:
    works = [StationWork(0, 1.0), StationWork(1, 1.0), StationWork(0, 1.0)]
    assert passage_s(works, 2, cluster(2)) == pytest.approx(4)


def profiled(model: nn.Module) -> ModelProfile:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    profile = profile_model(model, of_words, optimizers, words(ROWS)[0], ThreadComm())
    order = sorted(profile.layers, key=lambda layer: layer.needed_s)
    timed = replace(
        profile,
        layers=tuple(_timed(layer, order.index(layer), len(order)) for layer in profile.layers),
        forward_s=len(order) * EACH_S,
        backward_s=2 * len(order) * EACH_S,
        optimizer_s=len(order) * EACH_S / 1e3,
        update=UpdatePace(0.0, EACH_S / 1e3),
        rank_s=(3 * len(order) * EACH_S,),
    )
    return complete_profile(timed)


def _timed(layer: LayerProfile, number: int, count: int) -> LayerProfile:
    """Give a layer round times: each takes as long, and twice that in backward."""
    ready_s = 2 * (count - number) * EACH_S
    return replace(
        layer,
        needed_s=number * EACH_S,
        forward_s=EACH_S,
        backward_s=2 * EACH_S,
        parameters=tuple(replace(p, ready_s=ready_s) for p in layer.parameters),
    )


@pytest.mark.parametrize("tied", [False, True])
def test_uses_take_all_of_the_step(tied: bool) -> None:
    profile = profiled(Gpt(tied=tied, blocks=6))
    uses = uses_of(profile.layers)
    assert sum(use.forward_s for use in uses) == pytest.approx(profile.forward_s, rel=0.05)
    assert sum(use.backward_s for use in uses) == pytest.approx(profile.backward_s, rel=0.05)
    assert [use.layer for use in uses if not use.layer.startswith("blocks")] == [
        "words",
        "places",
        "norm",
        "words" if tied else "head",
    ]
    assert uses[0].inputs == {0: ROWS * LENGTH * 8}


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_cut_where_the_residual_stream_alone_crosses(tied: bool) -> None:
    profile = profiled(Gpt(tied=tied, blocks=6))
    slow = cluster(3, rate=1e5)
    holders = holders_of(profile, slow)
    stations = stations_of(uses_of(profile.layers), holders)
    assert {station.rank for station in stations} == {0, 1, 2}
    assert [station.before_bytes for station in stations[1:]] == [RESIDUAL] * (3 if tied else 2)


def test_fewer_ranks_have_layers_where_links_are_slow() -> None:
    profile = profiled(Gpt(blocks=6))
    ranks = range(1, 5)
    assert len({*holders_of(profile, cluster(4, rate=1e3), ranks).values()}) == 1
    assert len({*holders_of(profile, cluster(4, rate=1e12), ranks).values()}) == 4


def test_slow_ranks_have_fewer_layers() -> None:
    even = profiled(Gpt(blocks=6))
    profile = complete_profile(replace(even, rank_s=(0.1, 0.3)))
    hosts = cluster(2, rate=1e9, steady=True)

    def counted(profile: ModelProfile) -> list[int]:
        holders = holders_of(profile, hosts)
        return [list(holders.values()).count(rank) for rank in range(2)]

    assert counted(complete_profile(replace(even, rank_s=(0.25, 0.3)))) == counted(even)
    assert counted(profile)[0] > 1.5 * counted(profile)[1]
    assert {*holders_of(profile, hosts, [1]).values()} == {0}
    plans = [
        plan_for(profile, hosts, pins=pins)
        for pins in ({"*": "pipeline"}, {"*": "pipeline:1", "words": "pipeline:0"})
    ]
    alone_s = 2 * profile.step_s  # of the slow rank, with the rows of both
    assert 0.5 * alone_s > plans[0].predicted_s > 0.3 * alone_s
    assert plans[1].predicted_s > 0.8 * alone_s


def _tried(profile: ModelProfile, facts: RowFacts) -> ModelProfile:
    """Say of a profile that parts of rows were tried so."""
    layers = [
        replace(each, facts=(*(f for f in each.facts if not isinstance(f, RowFacts)), facts))
        for each in profile.layers
    ]
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (RowFacts("", rows=8), 8),
        (RowFacts("", rows=3), 2),
        (RowFacts("", rows=8, added=0.5), 1),
        (RowFacts("rows depend on one another", rows=8), 1),
    ],
)
def test_rows_go_in_as_many_parts_as_pay(facts: RowFacts, parts: int) -> None:
    profile, hosts = _tried(profiled(Gpt(blocks=6)), facts), cluster(4, rate=1e9)
    plan = plan_for(profile, hosts, strategies=["pipeline"])
    assert plan.micro_batches == parts
    assert predict_again(plan, profile, hosts).predicted_s == plan.predicted_s
    assert plan_for(profile, hosts, strategies=["pipeline"], micro_batches=1).micro_batches == 1


def test_values_cross_as_codes_where_links_are_slow() -> None:
    profile = profiled(Gpt(blocks=6))

    def ways(rate: float, codecs: Sequence[str]) -> set[str]:
        hosts = cluster(2, rate=rate)
        plan = plan_for(profile, hosts, strategies=["pipeline"], codecs=codecs)
        assert plan.predicted_s == predict_again(plan, profile, hosts).predicted_s
        return {choice.rows for choice in plan.choices}

    assert ways(2e4, ["bfloat16", "int8"]) == {"+bfloat16"}
    assert ways(2e4, ["int8"]) == ways(2e4, []) == ways(1e9, ["bfloat16"]) == {""}


@pytest.mark.parametrize(("hosts", "parts"), [(2, 1), (2, 4), (4, 2), (4, 8)])
def test_imagined_hosts_have_the_bubble_of_the_formula(hosts: int, parts: int) -> None:
    how = {"pins": {"*": "pipeline"}, "micro_batches": parts}  # on single ranks
    network = Network(bytes_per_s=1e12, latency_s=0.0, cores_per_rank=1.0)
    alone = shoal.Cluster(shoal.Topology(("h0",)), shoal.Link(0.0, inf))
    profile = _tried(profiled(Gpt(blocks=6)), RowFacts("", rows=8))
    answer = simulate(profile, alone, [hosts], Question(network, straggler=0.0, how=how))
    (scale,) = answer.scales
    part = scale.limits[BUBBLE] / (scale.limits[BUBBLE] + scale.limits[COMPUTE])
    assert scale.micro_batches == hosts * parts
    assert scale.ways == {"pipeline": len(profile.layers)}
    assert part == pytest.approx((hosts - 1) / (hosts * parts + hosts - 1), abs=0.06)


def test_explained_stations_send_both_ways() -> None:
    profile, hosts = profiled(Gpt(blocks=6)), cluster(3, rate=2e4)
    plan = plan_for(profile, hosts, pins={"*": "pipeline"})
    first, middle, last = explain(plan, profile, hosts).step.stations
    assert middle.sent_bytes == first.sent_bytes + last.sent_bytes == 2 * 3 * RESIDUAL


def test_the_step_that_is_predicted_is_in_the_plan() -> None:
    model = Gpt(blocks=6)
    plan = shoal.plan(
        model,
        of_words,
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        sample=words(ROWS)[0],
        cluster=cluster(4, rate=1e5),
        pins={"*": "pipeline"},
    )
    # all 4 micro-batches cross the first link, and the last one the others, there and back
    assert plan.predicted_s > 2 * (4 + 2) * RESIDUAL / 1e5
    assert {choice.exchange for choice in plan.choices} == {"0", "1", "2", "3"}


def test_no_cycle_keeps_a_model_that_was_recorded() -> None:
    model = Gpt()
    gone = ref(model)
    gc.disable()
    try:
        recorded(model, Forms(), model.forward, words(ROWS)[0][:1], {})
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_the_planner_takes_a_pipeline_where_it_is_much_faster() -> None:
    profile = profiled(Gpt(blocks=6))

    def planned(rate: float, **options: Any) -> set[str]:
        plan = plan_for(profile, cluster(2, rate=rate), **options)
        return {choice.strategy for choice in plan.choices}

    assert planned(2e4) == planned(2e4, codecs=["bfloat16"]) == {"pipeline"}
    assert "pipeline" not in planned(1e9)
    assert "pipeline" not in planned(2e4, strategies=["replicate"])
    assert "pipeline" not in planned(2e4, pins={"norm": "replicate"})


@pytest.mark.parametrize("rate", [2e4, 1e5, 2e5, 1e9])
def test_allowed_codecs_never_make_a_step_longer(rate: float) -> None:
    """At 1e5 bytes a second a pipeline is 1.3 times as fast as exact plans, but not as codes."""
    profile, hosts = profiled(Gpt(blocks=6)), cluster(2, rate=rate)
    codecs = ["int4", "int8", "bfloat16"]
    exact, coded = plan_for(profile, hosts), plan_for(profile, hosts, codecs=codecs)
    assert seconds_to_a_loss(coded) <= 1.001 * exact.predicted_s


def test_a_model_that_fits_no_rank_is_given_to_several() -> None:
    profile = profiled(Gpt(blocks=6))
    hosts = cluster(4, rate=1e9)
    limit = 0.9 * 2 * profile.nbytes  # of parameters and gradients
    with pytest.raises(PlanError, match="no plan was found that keeps the limit of memory"):
        plan_for(profile, hosts, strategies=["replicate"], memory_limit=limit)
    plan = plan_for(profile, hosts, strategies=["replicate", "pipeline"], memory_limit=limit)
    assert {choice.strategy for choice in plan.choices} == {"pipeline"}


@pytest.mark.parametrize(
    "options",
    [{"local_steps": 4}, {"update_every": {"words": 2}}, {"replan": True}, {"buffers": "local"}],
)
def test_what_a_pipeline_cannot_do_keeps_the_planner_off_it(options: dict[str, Any]) -> None:
    model = Gpt(blocks=6)
    if "buffers" in options:
        model.head = nn.Sequential(nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WORDS))
    plan = shoal.plan(
        model,
        of_words,
        [torch.optim.SGD(model.parameters(), lr=0.1)],
        sample=words(ROWS)[0],
        cluster=cluster(2, rate=1e3),
        **options,
    )
    assert "pipeline" not in {choice.strategy for choice in plan.choices}


def test_many_ranks_and_layers_are_dealt_in_seconds() -> None:
    profile = profiled(Gpt(blocks=30))
    began_s = time.thread_time()
    holders = unasked_holders(Predictor(profile, cluster(64, rate=1e6)), "pipeline")
    assert holders is not None and {*holders.values()} == {*range(64)}
    assert time.thread_time() - began_s < 20
    assert unasked_holders(Predictor(profile, cluster(65, rate=1e6)), "pipeline") is None
