"""What training code of all ages does behind autograd's back: the same as in one process, or an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    mlp,
    sgd,
)
from torch import Tensor, nn, optim
from torch.nn import functional as F
from with_tables import Words
from with_tables import assert_same as assert_same_at_servers

import shoal
from shoal.core.errors import PlanError, ShoalError, UsageError

WHOLE = ["replicate", "sliced", "server", "factor"]


def doing(
    act: Callable[[nn.Module], None],
    before_step: bool,
    model: nn.Module,
    loss_fn: Any,
    optimizer: Any,
    batches: Any,
) -> None:
    """A loop that does something to the model in its second step, with gradients or, behind the
    step, without.
    """
    for number, (x, y) in enumerate(batches):
        loss_fn(model(x), y).backward()
        if number == 1 and before_step:
            act(model)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and not before_step:
            act(model)


def there_and_back(model: nn.Module) -> None:
    model.float()
    model.double()


def set_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)


@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("before_step", [False, True])
def test_a_model_that_is_converted_there_and_back_trains_on(way: str, before_step: bool) -> None:
    loop = partial(doing, there_and_back, before_step)
    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), way=way, within=1e-6)


@pytest.mark.parametrize("way", WHOLE)
def test_gradients_whose_data_is_set_count_once_and_no_longer(way: str) -> None:
    assert_same(
        Training(model=built(mlp), batches=features(7, 3), loop=partial(doing, set_data, True)),
        way=way,
    )


class Calls(optim.SGD):
    """Calls its base class's step, whose hooks torch then runs as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def calling(parameters: Any) -> optim.Optimizer:
    optim.SGD([nn.Parameter(torch.zeros(1))])  # so that the base class's step has hooks
    return Calls(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("way", [*WHOLE, "column"])
def test_a_step_that_calls_its_base_class_s(way: str) -> None:
    assert_same(Training(model=built(mlp), batches=features(7, 3), optimizer=calling), way=way)


def test_a_step_that_calls_its_base_class_s_beside_tables_at_servers() -> None:
    assert_same_at_servers(built(Words), optimizer=calling)


class Writing(optim.Optimizer):
    """Writes into the gradients, as torch's own did before version 1.5."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "weight_decay": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    slope = parameter.grad.data
                    slope.add_(parameter.data, alpha=group["weight_decay"])
                    parameter.data.add_(slope, alpha=-group["lr"])


def words() -> list[Batch]:
    return [(integers(23, 12, 2, seed=step), integers(3, 12, seed=step)) for step in range(6)]


@pytest.mark.parametrize("way", ["replicate", "sliced", "embedding"])
def test_an_optimizer_that_writes_into_gradients(way: str) -> None:
    assert_same(Training(model=built(Words), batches=words(), optimizer=Writing), way=way)


def test_an_optimizer_that_writes_into_gradients_of_tables_at_servers() -> None:
    assert_same_at_servers(built(Words), optimizer=Writing)


def test_parameters_that_share_memory_have_no_owners() -> None:
    there, back, alone = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
    back.weight.data = there.weight.data
    model, where = nn.Sequential(there, back, alone), cluster_of(2, 1)
    x, y = torch.randn(4, 6), torch.randint(6, (4,))
    for strategy in ("sliced", "server", "column"):
        with pytest.raises(PlanError, match="shares memory with another one"):
            shoal.plan(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=(x, y),
                cluster=where,
                pins={"1": strategy},
            )
    shoal.plan(
        model,
        F.cross_entropy,
        sgd(model.parameters()),
        sample=(x, y),
        cluster=where,
        pins={"2": "sliced"},
    )


def test_an_optimizer_s_parameter_that_is_no_model_s_is_refused() -> None:
    scale = [nn.Parameter(torch.ones(())) for _ in range(2)]

    def loop(model: nn.Module, loss_fn: Any, optimizer: optim.Optimizer, batches: Any) -> None:
        own = scale.pop()
        optimizer.param_groups[0]["params"].append(own)
        for x, y in batches:
            (loss_fn(model(x), y) * own).backward()
            optimizer.step()

    with pytest.raises(UsageError, match="no parallelised model's"):
        Training(model=built(mlp), batches=features(7, 3), loop=loop).on_ranks(2, "replicate")


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_model_that_is_laid_otherwise_in_memory_is_refused(way: str) -> None:
    def convolving() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 2 * 2, 3))

    def batch(seed: int) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(12, 3, 4, 4, generator=draw), torch.randint(3, (12,), generator=draw)

    loop = partial(doing, lambda model: model.to(memory_format=torch.channels_last), False)
    with pytest.raises(ShoalError, match="was converted after parallelize"):
        Training(model=convolving(), batches=[batch(i) for i in range(4)], loop=loop).on_ranks(
            2, way
        )


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_layer_without_weights(way: str) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing, self.out = nn.Linear(0, 3), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x) + self.nothing(x[:, :0])

    assert_same(Training(model=built(Empty), batches=features(7, 3), optimizer=sgd), way=way)
