"""Plans with the older name "stage": they are read as a pipeline on hosts that bring no rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import Batch, built, cluster_of, features, sgd
from torch.nn import functional as F
from with_tail import CLASSES, WIDTH, Net, assert_same, together

import shoal
from shoal.core.plan import Choice, Plan
from shoal.front.options import Options
from shoal.front.request import facts_for, request_of
from shoal.profiling.identity import model_digest, trainable_layers
from shoal.session.session import current


def older_plan(ways: dict[str, str]) -> Plan:
    """The plan of an older release, with four micro-batches."""
    model = built(Net)
    choices = [
        Choice(layer.name, "stage", ways[layer.name])
        if layer.name in ways
        else Choice(layer.name, "replicate", "direct")
        for layer in trainable_layers(model)
    ]
    return Plan(3, model_digest(model), tuple(choices[::-1]), 4 << 20, 3, micro_batches=4)


ONE = {"tail.1": "", "tail.3": "", "tail.5": ""}
SHARED = {"tail.1": "column_pair", "tail.3": "row_pair", "tail.5": "sliced:direct"}


@pytest.mark.parametrize(("ways", "tail"), [(ONE, 1), (SHARED, 2)], ids=["one", "shared"])
def test_an_older_plan_trains(
    ways: dict[str, str], tail: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = json.loads(older_plan(ways).to_json()) | {"joined": True}
    (tmp_path / "plan.json").write_text(json.dumps(text))
    with caplog.at_level("INFO", "shoal"):
        assert_same(built(Net), tail=tail, pins=None, plan=tmp_path / "plan.json")
    (line,) = [line for line in caplog.messages if "is an older name" in line]
    assert "tail.1 on rank 3" in line and f"tail.5 on rank {2 + tail}" in line
    assert ("each holds some of the layers" in line) == (tail == 2)


def read(options: Options, tail: int, model: torch.nn.Module | None = None) -> Plan:
    """The draft of a request on three ranks."""
    model = model or built(Net)
    cluster = replace(cluster_of(3), tail=tuple(f"tail{number}" for number in range(tail)))
    return request_of(options, model, facts_for(options, model, cluster)).draft


def ways(plan: Plan) -> dict[str, str]:
    return {choice.layer: choice.way for choice in plan.choices}


def test_a_codec_stays_and_ways_to_share_go() -> None:
    plan = older_plan(dict.fromkeys(ONE, "+bfloat16:sliced:direct"))
    got = ways(read(Options(plan=plan), 3))
    assert got["tail.1"] == "pipeline+bfloat16:3" and got["tail.5"] == "pipeline+bfloat16:5"
    assert got["body.0"] == "replicate:direct"


@pytest.mark.parametrize("pin", ["stage+bfloat16", "stage+bfloat16:column"])
def test_pins_name_the_one_host_or_leave_several_to_the_planner(pin: str) -> None:
    pins = {"body.*": "replicate", "tail.1": pin}
    assert ways(read(Options(pins=pins), 1)) == {
        "body.0": "replicate",
        "body.2": "replicate",
        **dict.fromkeys(ONE, "pipeline+bfloat16:3"),
    }
    assert ways(read(Options(pins=pins), 2))["tail.5"] == "pipeline+bfloat16"


@pytest.mark.parametrize("hosts", [0, 1])
def test_a_later_pin_may_win_against_all_of_them(hosts: int) -> None:
    got = ways(read(Options(pins={"tail.1": "stage", "*": "replicate"}), hosts))
    assert set(got.values()) == {"replicate"}


def test_all_layers_may_be_on_hosts() -> None:
    got = ways(read(Options(pins={"*": "stage"}), 2))
    assert set(got.values()) == {"pipeline:3", "pipeline:4"}


@pytest.mark.parametrize(
    ("strategies", "tail", "usable"),
    [
        (["stage", "replicate"], 1, {"pipeline", "replicate"}),
        (["stage"], 1, {"pipeline", "replicate"}),
        (["stage", "sliced"], 0, {"sliced"}),
    ],
)
def test_a_list_of_strategies_may_name_it(
    strategies: list[str], tail: int, usable: set[str]
) -> None:
    options, model = Options(strategies=tuple(strategies)), built(Net)
    cluster = replace(cluster_of(3), tail=("tail",) * tail)
    assert set(request_of(options, model, facts_for(options, model, cluster)).usable) == usable


def test_a_second_model_is_planned_without_the_hosts() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> set[str]:
        other = built(Net)
        shoal.parallelize(other, F.cross_entropy, sgd(other.parameters()), sample=its[0])
        return {choice.strategy for choice in current().attached[other].plan.choices}

    _, found = together(built(Net), loop, given=features(WIDTH, CLASSES))
    assert all("pipeline" not in ways for ways in found)
