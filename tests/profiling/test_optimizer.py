"""The optimizer's step is timed on copies, for optimizers of any kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.facts import UpdatePace
from shoal.profiling.optimizer import OptimizerCost, _Scratch

pytestmark = pytest.mark.exact_times


class Demanding(torch.optim.SGD):
    """Cannot be built from its defaults."""

    def __init__(self, params: Any, secret: object) -> None:
        super().__init__(params, lr=0.1)
        assert secret == "known"


STEPPED = pytest.mark.parametrize(
    "build",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.AdamW(params),
        lambda params: torch.optim.Adagrad(params),
        lambda params: torch.optim.LBFGS(params),
        lambda params: Demanding(params, "known"),
    ],
    ids=["sgd", "adamw", "adagrad", "lbfgs", "demanding"],
)


@STEPPED
def test_every_optimizer_has_a_price_and_is_left_alone(build: Callable[[Any], Optimizer]) -> None:
    parameter = nn.Parameter(torch.ones(1000, 100))
    optimizer = build([parameter])
    before = str(optimizer.state_dict())
    assert 0 < OptimizerCost.of([optimizer]).seconds < 5
    assert str(optimizer.state_dict()) == before
    assert torch.equal(parameter, torch.ones(1000, 100)) and parameter.grad is None


def test_parameters_cost_something_whatever_their_size() -> None:
    few, many = (
        OptimizerCost.of([torch.optim.AdamW([nn.Parameter(torch.ones(8)) for _ in range(count)])])
        for count in (2, 40)
    )
    for cost, count in ((few, 2), (many, 40)):
        assert cost.pace.parameter_s > 0 and cost.pace.of(count) <= 1.001 * cost.seconds
    assert many.pace.of(40) > many.seconds / 5, "so small that bytes take hardly anything"
    large = OptimizerCost.of([torch.optim.AdamW([nn.Parameter(torch.ones(4_000_000))])])
    assert large.pace.of(1) < large.seconds / 5


def test_groups_keep_their_options_and_frozen_parameters_cost_nothing() -> None:
    a, b, frozen = (nn.Parameter(torch.ones(4, 5)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [a, frozen]}, {"params": [b], "momentum": 0.9}], lr=0.1)
    scratch = _Scratch.of(optimizer, {})
    groups = scratch.groups
    assert scratch.share == scratch.held == 1 and [group["momentum"] for group in groups] == [
        0,
        0.9,
    ]
    assert [len(group["params"]) for group in groups] == [1, 1] and groups[0]["params"][0] is not a
    assert OptimizerCost.of([torch.optim.SGD([frozen], lr=0.1)]) == OptimizerCost(
        0.0, 0.0, UpdatePace()
    )


def test_what_is_over_the_cap_is_scaled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.optimizer._MOST_ELEMENTS", 150)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(10, 10)) for _ in range(4)], lr=0.1)
    scratch = _Scratch.of(optimizer, {})
    assert [p.shape for p in scratch.groups[0]["params"]] == [(10, 10), (5, 10)]
    assert scratch.share == scratch.held == pytest.approx(150 / 400)


def test_of_few_elements_there_are_several_copies() -> None:
    """So that a step's price is that of a model which no cache holds."""
    groups = [{"params": [nn.Parameter(torch.ones(10, 10)) for _ in range(2)]}]
    groups += [{"params": [nn.Parameter(torch.ones(300))], "lr": 0.5}]
    scratch = _Scratch.of(torch.optim.SGD(groups, lr=0.1), {}).several()
    assert scratch.share == scratch.held == 32
    assert [len(group["params"]) for group in scratch.groups] == [64, 32]
    assert len({p.data_ptr() for group in scratch.groups for p in group["params"]}) == 96
    assert [group["lr"] for group in scratch.groups] == [0.1, 0.5]


def test_of_many_elements_there_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.optimizer._LEAST_ELEMENTS", 150)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(10, 10))])
    assert _Scratch.of(optimizer, {}).several().share == 1
    monkeypatch.setattr("shoal.profiling.optimizer._LEAST_ELEMENTS", 350)
    several = OptimizerCost.of([optimizer])
    assert several.state_bytes == pytest.approx(2 * 400, rel=0.02)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_of_sparse_gradients_the_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.profiling.optimizer._MOST_ELEMENTS", 150)
    tables = [nn.Parameter(torch.ones(10, 10)) for _ in range(4)]
    optimizer = torch.optim.SparseAdam(tables, lr=0.1)
    scratch = _Scratch.of(optimizer, dict.fromkeys(tables, 7))
    first, half = scratch.groups[0]["params"]
    assert (first.grad._nnz(), half.grad._nnz()) == (7, 5)
    assert scratch.share == pytest.approx(120 / 280) and scratch.held == pytest.approx(150 / 400)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_update_costs_what_it_touches_and_its_state_is_whole() -> None:
    table = nn.Parameter(torch.ones(100_000, 64))
    optimizer = torch.optim.SparseAdam([table], lr=0.1)
    few = [OptimizerCost.of([optimizer], {table: 10}) for _ in range(5)]
    assert few[0].state_bytes == pytest.approx(2 * table.nbytes, rel=0.01)
    many = OptimizerCost.of([optimizer], {table: 50_000})
    assert min(cost.seconds for cost in few) < many.seconds / 10
