"""Wishes: a list of strategies, and replicas where they do not fit; pins on top of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_process import (
    State,
    Training,
    assert_trained,
    built,
    cluster_of,
    features,
    on_threads,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError
from shoal.front.session_start import using

BATCHES = features(7, 3)


def network() -> nn.Module:
    """Linear layers with a norm between them, which few strategies serve."""
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.LayerNorm(9), nn.Linear(9, 3))


def expected() -> State:
    return Training(model=built(network), batches=BATCHES).alone()


@pytest.mark.parametrize(
    ("listed", "served"),
    [
        (["factor"], ["factor", "replicate", "factor"]),
        (["column"], ["column", "replicate", "column"]),
        (["row", "head"], ["row", "replicate", "row"]),
        (["sliced"], ["sliced"] * 3),
    ],
)
def test_what_they_do_not_fit_is_replicated(listed: list[str], served: list[str]) -> None:
    def work(comm: ThreadComm) -> tuple[list[str], State]:
        model, mine = built(network), [rows_of(b, comm.rank, 2, True) for b in BATCHES]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                nn.CrossEntropyLoss(),
                sgd(model.parameters()),
                sample=mine[0],
                strategies=listed,
            )
            plain(model, loss_fn, optimizer, mine)
            plan = shoal.plan_of(model)
            assert plan is not None
            by_name = {choice.layer: choice.strategy for choice in plan.choices}
            return [by_name[name] for name in ("0", "2", "3")], state(model)

    ranks = on_threads(2, work)
    assert [ways for ways, _ in ranks] == [served] * 2
    assert_trained(state(built(network)), expected(), [of_rank for _, of_rank in ranks])


@pytest.mark.parametrize(
    "pin", ["factor", "column", "sliced", "replicate:ring", "replicate:direct+bfloat16"]
)
def test_pins_win_over_a_given_plan(pin: str, tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> State:
        mine = [rows_of(b, comm.rank, 2, True) for b in BATCHES]

        def parallelized(model: nn.Module, **how: Any) -> Any:
            optimizer = sgd(model.parameters())
            return shoal.parallelize(model, nn.CrossEntropyLoss(), optimizer, sample=mine[0], **how)

        with using(comm, cluster_of(2)):
            first, *_ = parallelized(built(network), pins={"*": "replicate:direct"})
            plan = shoal.plan_of(first)
            assert plan is not None
            if comm.rank == 0:
                plan.save(tmp_path / "plan.json")
            comm.gather_objects(None, "the plan is there")
            path = tmp_path / "plan.json"
            model, loss_fn, optimizer = parallelized(built(network), plan=path, pins={"3": pin})
            plain(model, loss_fn, optimizer, mine)
            made = shoal.plan_of(model)
            assert made is not None and made.predicted_s > 0
            ways = {choice.layer: choice.way for choice in made.choices}
            assert ways["0"] == ways["2"] == "replicate:direct" and ways["3"].startswith(pin)
            with pytest.raises(PlanError, match=r"row cannot serve layer 2"):
                parallelized(built(network), plan=path, pins={"2": "row"})
            return state(model)

    within = 1e-2 if "bfloat16" in pin else 1e-10
    assert_trained(state(built(network)), expected(), on_threads(2, work), within)
