"""Optimizers and a model for tests of updates at the owners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim


def mlp() -> nn.Module:
    """Sizes that no number of ranks divides, and an own parameter without dimensions."""
    return nn.Sequential(nn.Linear(7, 5), Scaled(), nn.Tanh(), nn.Linear(5, 3))


class Scaled(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.05),
    "nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused sgd": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "foreach sgd": partial(optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    "adam": partial(optim.Adam, lr=0.05, amsgrad=True),
    "fused adamw": partial(optim.AdamW, lr=0.05, fused=True),
    "adam with a tensor for its rate": partial(
        optim.Adam, lr=torch.tensor(0.05, dtype=torch.float64)
    ),
    "rmsprop": partial(optim.RMSprop, lr=0.05, momentum=0.5, centered=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.3),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.05),
    "nadam": partial(optim.NAdam, lr=0.05),
    "radam": partial(optim.RAdam, lr=0.05),
    "rprop": partial(optim.Rprop, lr=0.05),
    "asgd": partial(optim.ASGD, lr=0.05),
}


class Normed(optim.Optimizer):
    """A step of the length of the parameter, as LARS has it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ):
            parameter -= 0.1 * parameter.norm() / (1e-9 + parameter.grad.norm()) * parameter.grad


def groups(parameters):
    """Two groups with settings of their own."""
    first, *rest = parameters
    return optim.AdamW(
        [{"params": [first], "lr": 0.01, "weight_decay": 0.3}, {"params": rest}], lr=0.05
    )


def stepped(model, loss_fn, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def assert_same_state(expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Two optimizer states are the same to 1e-10."""
    assert expected["param_groups"] == got["param_groups"]
    assert expected["state"].keys() == got["state"].keys()
    for index, state in expected["state"].items():
        assert state.keys() == got["state"][index].keys()
        for name, value in state.items():
            other = got["state"][index][name]
            assert torch.is_tensor(value) == torch.is_tensor(other)
            if torch.is_tensor(value):
                assert value.shape == other.shape and value.dtype == other.dtype, name
                torch.testing.assert_close(other, value, rtol=1e-10, atol=1e-10)
            else:
                assert value == other
