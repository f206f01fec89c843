"""LBFGS steers by the loss of its closure: on every rank by that of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from one_process import AUTO, Training, assert_same, built, features, mlp
from torch import Tensor, nn
from torch.optim import LBFGS

from shoal.core.errors import PlanError


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


def check(way: str, search: str | None, how: dict[str, Any], decay: float = 0.0) -> None:
    training = Training(
        model=built(mlp),
        batches=features(7, 3, steps=3),
        loss_fn=nn.CrossEntropyLoss(**how),
        optimizer=partial(LBFGS, lr=0.5, max_iter=3, line_search_fn=search),
        loop=partial(loop, decay=decay),
    )
    assert_same(training, 2, way, uneven=True)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(
    "how", [{"reduction": "mean"}, {"reduction": "sum"}, {"ignore_index": 0}], ids=str
)
@pytest.mark.parametrize("way", ["replicate", "factor"])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_it_goes_as_in_one_process(search: Any, how: Any, way: str, decay: float) -> None:
    if decay and how.get("reduction") == "sum":
        pytest.skip("a term of parameters alone is no sum over rows")

    check(way, search, how, decay)


def test_the_planner_leaves_its_layers_whole_and_a_pin_that_does_not_is_refused() -> None:
    check(AUTO, None, {})
    with pytest.raises(PlanError, match="LBFGS does not update a part of a tensor"):
        check("sliced", None, {})
