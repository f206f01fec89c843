"""LBFGS steers by the loss of its closure: on every rank by that of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    State,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    on_threads,
    rows_of,
    state,
)
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError
from shoal.front.joining import using

BATCHES = features(7, 3, steps=3)


def loop(model: Any, loss_fn: Any, optimizer: Any, batches: Any, decay: float = 0.0) -> None:
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            if decay:
                loss = loss + decay * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        optimizer.step(closure)


def trained(make: Callable[..., Any], loss: nn.Module, decay: float, **how: Any) -> None:
    alone = built(mlp)
    loop(alone, loss, make(alone.parameters()), BATCHES, decay)

    def work(comm: ThreadComm) -> State:
        model, mine = built(mlp), [rows_of(batch, comm.rank, 2, True) for batch in BATCHES]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                model, type(loss)(**vars_of(loss)), make(model.parameters()), sample=mine[0], **how
            )
            loop(model, loss_fn, optimizer, mine, decay)
            return state(model)

    ranks = on_threads(2, work)
    assert_same_bits(ranks)
    assert difference(state(alone), ranks[0]) <= 1e-10
    assert difference(state(built(mlp)), state(alone)) > 1e-3


def vars_of(loss: nn.Module) -> dict[str, Any]:
    return {"reduction": loss.reduction, "ignore_index": loss.ignore_index}


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(
    "how", [{"reduction": "mean"}, {"reduction": "sum"}, {"ignore_index": 0}], ids=str
)
@pytest.mark.parametrize("way", ["replicate", "factor"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_it_goes_as_in_one_process(search: Any, how: Any, way: str, decay: float) -> None:
    if decay and how.get("reduction") == "sum":
        pytest.skip("a term of parameters alone is no sum over rows")

    def make(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn=search)

    trained(make, nn.CrossEntropyLoss(**how), decay, pins={"*": way})


def test_the_planner_leaves_its_layers_whole_and_a_pin_that_does_not_is_refused() -> None:
    def make(parameters: Any) -> Any:
        return torch.optim.LBFGS(parameters, max_iter=2)

    trained(make, nn.CrossEntropyLoss(), 0.0)
    with pytest.raises(PlanError, match="LBFGS does not update a part of a tensor"):
        trained(make, nn.CrossEntropyLoss(), 0.0, pins={"0": "sliced"})
