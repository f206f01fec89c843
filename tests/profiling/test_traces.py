"""Profiling leaves no trace in what model, loss, sample and optimizer refer to."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.threads import ThreadComm
from shoal.profiling.layers import profile_model

CALLS: list[int] = []
STEPS = 0


class Meter:
    """An object of the script's own."""

    made = 0
    __slots__ = ("count", "values")

    def __init__(self) -> None:
        self.count, self.values = 0, deque[float](maxlen=3)

    def update(self, value: float) -> None:
        Meter.made += 1
        self.count += 1
        self.values.append(value)


class Net(nn.Module):
    """Leaves traces of every kind in what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.extra: list[Tensor] = []
        self.seen = {"rows": 0, "shapes": set[Any]()}
        self.meter = Meter()
        self.history = np.zeros(3)
        self.noise = torch.Generator().manual_seed(0)
        self.draws = np.random.default_rng(0)
        self.luck = random.Random(0)
        self.cache = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        CALLS.append(len(x))
        x.mul_(0.5).add_(1.0)
        output = self.last(x)
        self.extra.append(output.mean())
        self.seen["rows"] += len(x)  # type: ignore[operator]
        self.seen["shapes"].add(tuple(x.shape))  # type: ignore[attr-defined]
        self.meter.update(float(output.detach().mean()))
        self.history[0] += 1
        self.cache.add_(1)
        scale = torch.rand(1, generator=self.noise) + self.draws.random() + self.luck.random()
        return output * scale.to(x.dtype)


def profiled(model: nn.Module, loss_fn: Any, sample: Any = None, optimizers: Any = ()) -> None:
    sample = sample or (torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    profile_model(model, loss_fn, optimizers, sample, ThreadComm())


def test_what_a_module_has_stays() -> None:
    model = Net()
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    kept = x.clone()
    profiled(model, F.cross_entropy, (x, y))
    assert torch.equal(x, kept)
    assert model.extra == [] and model.seen == {"rows": 0, "shapes": set()}
    assert (model.meter.count, list(model.meter.values), Meter.made) == (0, [], 0)
    assert (CALLS, STEPS) == ([], 0)
    assert not model.history.any() and not model.cache.any()
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1, generator=model.noise), expected)
    assert model.draws.random() == np.random.default_rng(0).random()
    assert model.luck.random() == random.Random(0).random()


class Made(OrderedDict[str, Any]):
    """Makes an object of the class that it holds, as the activations of transformers do."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


def test_a_dict_of_a_class_of_its_own_keeps_what_it_holds() -> None:
    model = nn.Linear(6, 3)
    model.made = made = Made(tanh=nn.Tanh)  # type: ignore[assignment]
    profiled(model, F.cross_entropy)
    assert dict.__getitem__(made, "tanh") is nn.Tanh
    assert isinstance(made["tanh"], nn.Tanh)


class Annealed:
    """A loss that counts its calls."""

    steps = 0

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        loss = F.cross_entropy(output, y) + min(1.0, self.steps / 100) * output.square().mean()
        self.seen.append(float(loss.detach()))
        return loss

    def method(self, output: Tensor, y: Tensor) -> Tensor:
        return self(output, y)


@pytest.mark.parametrize("bound", [False, True])
def test_a_loss_that_counts_starts_at_nothing(bound: bool) -> None:
    loss = Annealed()
    profiled(nn.Linear(6, 3), loss.method if bound else loss)
    assert "steps" not in vars(loss) and loss.seen == []


def test_a_function_keeps_what_it_closes_over() -> None:
    steps, seen = 0, []

    def loss(output: Tensor, y: Tensor, again: list[int] = []) -> Tensor:  # noqa: B006
        nonlocal steps
        steps += 1
        seen.append(steps)
        again.append(steps)
        loss.calls += 1  # type: ignore[attr-defined]
        return F.cross_entropy(output, y)

    loss.calls = 0  # type: ignore[attr-defined]
    profiled(nn.Linear(6, 3), loss)
    assert (steps, seen, loss.__defaults__) == (0, [], ([],))
    assert loss.calls == 0  # type: ignore[attr-defined]


def test_a_discriminator_that_the_loss_uses_stays() -> None:
    critic = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    critic[1].weight.grad = gradient = torch.ones(1, 3)
    profiled(nn.Linear(6, 3), lambda output, y: critic(output).mean())
    assert all(torch.equal(before[name], now) for name, now in critic.state_dict().items())
    assert critic[1].weight.grad is gradient and torch.equal(gradient, torch.ones(1, 3))
    assert critic[1].bias.grad is None


def test_hooks_that_collect_features_have_collected_none() -> None:
    model, features = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), []
    model[0].register_forward_hook(lambda module, args, output: features.append(output))
    profiled(model, lambda output, y: F.cross_entropy(output, y) + features[-1].square().mean())
    assert features == []


def test_a_batch_is_given_as_it_was_each_time() -> None:
    """One that is taken apart, or that would grow beyond all bounds."""

    class Doubles(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            input.mul_(1e3)
            assert float(input.abs().max()) < 1e4
            return super().forward(input)

    def loss(output: Tensor, y: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, y.pop("labels"))

    x, y = torch.ones(4, 6), {"labels": torch.tensor([0, 1, 2, 0])}
    profiled(Doubles(6, 3), loss, (x, y))
    assert torch.equal(x, torch.ones(4, 6)) and list(y) == ["labels"]


def test_an_optimizer_of_the_scripts_own_draws_nothing() -> None:
    class Noisy(torch.optim.SGD):
        steps = 0

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr)
            self.noise = torch.Generator().manual_seed(0)

        def step(self, closure: Any = None) -> Any:
            Noisy.steps += 1
            torch.rand(1, generator=self.noise)
            return super().step(closure)

    model = nn.Linear(6, 3)
    optimizer = Noisy(model.parameters(), 0.1)
    profiled(model, F.cross_entropy, optimizers=[optimizer])
    expected = torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(1, generator=optimizer.noise), expected)
    assert Noisy.steps == 0
