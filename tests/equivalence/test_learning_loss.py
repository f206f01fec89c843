"""A loss with parameters of its own: exchanged, clipped, saved and released as the model's are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    State,
    assert_same_bits,
    assert_trained,
    built,
    cluster_of,
    difference,
    features,
    mlp,
    on_threads,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError
from shoal.front.session_start import using

BATCHES = features(7, 3)


class Temperature(nn.Module):
    """A cross entropy with a learned temperature."""

    def __init__(self, reduction: str = "mean", ignore_index: int = -100) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.how = {"reduction": reduction, "ignore_index": ignore_index}

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * output, y, **self.how)


class ArcFace(nn.Module):
    """Classes as directions, with a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(output), F.normalize(self.weight))
        return F.cross_entropy(4 * (cosine - 0.2 * F.one_hot(y, 4)), y)


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "temperature": Temperature,
    "a sum": lambda: Temperature("sum"),
    "ignored": lambda: Temperature(ignore_index=0),
    "arcface": ArcFace,
}


def one(model: nn.Module, loss: nn.Module) -> list[Optimizer]:
    return [sgd([*model.parameters(), *loss.parameters()])]


def two(model: nn.Module, loss: nn.Module) -> list[Optimizer]:
    return [sgd(model.parameters()), torch.optim.SGD(loss.parameters(), 0.01)]


def loop(model: Any, loss_fn: Any, optimizers: list[Optimizer], batches: Any) -> None:
    for x, y in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *loss_fn.parameters()], 0.3)
        for optimizer in optimizers:
            optimizer.step()


def both(model: nn.Module, loss: nn.Module) -> State:
    return {**state(model), **{f"loss {name}": value for name, value in state(loss).items()}}


@pytest.mark.parametrize("given", [one, two])
@pytest.mark.parametrize("way", ["replicate", "sliced", "column"])
@pytest.mark.parametrize("kind", LOSSES)
def test_it_learns_as_in_one_process(kind: str, way: str, given: Any) -> None:
    check(kind, given, pins={"*": way})


def test_terms_that_are_counted() -> None:
    check("ignored", one, count=lambda output, y: (y != 0).sum())


def check(kind: str, given: Callable[..., list[Optimizer]], **how: Any) -> None:
    alone, own_loss = built(mlp), built(LOSSES[kind])
    loop(alone, own_loss, given(alone, own_loss), BATCHES)

    def work(comm: ThreadComm) -> State:
        mine = [rows_of(batch, comm.rank, 2, True) for batch in BATCHES]
        model, loss = built(mlp), built(LOSSES[kind])
        optimizers = given(model, loss)
        with using(comm, cluster_of(2)):
            model, loss_fn, _ = shoal.parallelize(model, loss, optimizers, sample=mine[0], **how)
            assert loss_fn is loss and shoal.is_parallelized(loss)
            loop(model, loss_fn, optimizers, mine)
            return both(model, loss)

    start, expected = both(built(mlp), built(LOSSES[kind])), both(alone, own_loss)
    assert_trained(start, expected, on_threads(2, work))


def test_layers_that_are_updated_less_often_are_the_models() -> None:
    def work(comm: ThreadComm) -> tuple[State, Any]:
        mine = [rows_of(batch, comm.rank, 2, True) for batch in BATCHES]
        model, loss = built(mlp), built(Temperature)
        with using(comm, cluster_of(2)):
            optimizers = one(model, loss)
            shoal.parallelize(model, loss, optimizers, sample=mine[0], update_every={"2": 2})
            loop(model, loss, optimizers, mine)
            plan, of_loss = shoal.plan_of(model), shoal.plan_of(loss)
            assert plan is not None and of_loss is not None
            return both(model, loss), (plan.update_every, of_loss.update_every)

    ranks = on_threads(2, work)
    assert ranks[0][1] == ({"2": 2}, {})
    assert_same_bits([of_rank for of_rank, _ in ranks])


@pytest.mark.parametrize("how", [{"pins": {"*": "pipeline"}}, {"strategies": ["pipeline"]}])
def test_a_pipeline_is_refused_and_never_planned(how: dict[str, Any]) -> None:
    def work(comm: ThreadComm) -> None:
        x, y = rows_of(BATCHES[0], comm.rank, 2)
        model, loss = built(mlp), built(Temperature)
        with using(comm, cluster_of(2)), pytest.raises(UsageError, match="trainable parameter"):
            shoal.parallelize(model, loss, one(model, loss), sample=(x, y), **how)

    on_threads(2, work)


def test_it_is_saved_and_released_with_the_model(tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in BATCHES]
        model, loss = built(mlp), built(ArcFace)
        optimizers = one(model, loss)
        with using(comm, cluster_of(2)):
            shoal.parallelize(model, loss, optimizers, sample=mine[0])
            loop(model, loss, optimizers, mine[:3])
            shoal.save(tmp_path / "saved", model=model, loss=loss, optimizer=optimizers[0])
            loop(model, loss, optimizers, mine[3:])
            expected = both(model, loss)
            shoal.load(tmp_path / "saved", model=model, loss=loss, optimizer=optimizers[0])
            loop(model, loss, optimizers, mine[3:])
            got = both(model, loss)
            shoal.unparallelize(model)
            assert not shoal.is_parallelized(loss)
            loss(model(mine[0][0]), mine[0][1]).backward()
            return expected, got

    for expected, got in on_threads(2, work):
        assert difference(expected, got) == 0
