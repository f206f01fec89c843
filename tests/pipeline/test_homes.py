"""Pipelines: frozen parameters, and buffers of modules that nobody trains, are on one rank."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import Batch, adamw, built, difference, features, state
from piped import Script, assert_same, loss_of, plain, script
from test_states import of_part
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import PlanError

PINS = {"first": "pipeline:0", "middle": "pipeline:1", "last": "pipeline:1"}


ADAPTED = {f"blocks.{number}.*": f"pipeline:{number}" for number in range(3)}
HALF = {"blocks.*": "pipeline:0", "norm": "pipeline:1", "head": "pipeline:2"}


@pytest.mark.parametrize(
    ("kind", "pins"),
    [("adapted", ADAPTED), pytest.param("frozen first", HALF, marks=pytest.mark.slow)],
)
def test_a_rank_keeps_the_frozen_parameters_that_it_uses(kind: str, pins: Any) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> Any:
        with torch.inference_mode():
            loss_of(model, loss_fn, batches[0])
        plain(model, loss_fn, optimizer, batches)
        if shoal.world().size == 1:
            return None
        memory, before = shoal.memory(model), state(model)
        shoal.unparallelize(model)
        assert all(torch.equal(value, before[name]) for name, value in state(model).items())
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        return memory

    tried = script(kind, loop=loop)
    held = [memory.parameters for memory, _ in assert_same(tried, 3, pins=pins)]
    whole = sum(parameter.nbytes for parameter in tried.model.parameters())
    assert sum(held) == whole
    assert all(0 < each < (0.5 if kind == "adapted" else 1) * whole for each in held)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapted", "frozen first"])
def test_a_checkpoint_has_frozen_parameters(tmp_path: Path, kind: str) -> None:
    tried = script(kind, optimizer=adamw)
    _, expected = tried.alone()
    first, second = tmp_path / "first", tmp_path / "second"
    of_part(tried, 0, 2, None, first).on_ranks(4)
    of_part(tried, 2, 4, first, second).on_ranks(2)
    got = of_part(tried, 4, 5, second, None).on_ranks(3)
    assert difference(expected, got[0][1]) <= 1e-10


class Taught(nn.Module):
    """A model with a frozen teacher, which follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.teacher = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        student = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return student + 0.1 * self.teacher(x)


def follow(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Let the teacher follow the model behind each step."""
    for batch in batches:
        plain(model, loss_fn, optimizer, [batch])
        with torch.no_grad():
            model.teacher[0].weight.lerp_(model.first.weight, 0.3)
            model.teacher[2].bias.copy_(model.last.bias)


def test_a_teacher_follows_across_ranks() -> None:
    tried = Script(
        model=built(Taught), batches=features(7, 3), loss_fn=F.cross_entropy, loop=follow
    )
    assert_same(tried, 2, pins=PINS)


class Normed(nn.Module):
    """A model with a batch norm that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.norm(self.first(x)))))


class Constant(nn.Sequential):
    """Layers, and a buffer that training reads alone."""

    def __init__(self) -> None:
        first, middle, last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        super().__init__(OrderedDict(first=first, middle=middle, last=last))
        self.register_buffer("scale", torch.full((7,), 2.0))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale)


class Centred(Normed):
    """A model that reads and changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        centred = x - self.centre
        if self.training:
            self.keep(x.detach().mean(0))
        return self.last(torch.tanh(self.middle(centred)))

    def keep(self, mean: Tensor) -> None:
        self.centre.mul_(0.5).add_(mean, alpha=0.5)


class Replaced(Centred):
    """The same with another tensor after each forward."""

    def keep(self, mean: Tensor) -> None:
        self.centre = 0.5 * self.centre + 0.5 * mean


class Halfway(Centred):
    """A buffer that forward reads far behind its change."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.keep(hidden.detach().mean(0))
        scale = torch.sigmoid(self.centre)
        return self.last(torch.tanh(self.middle(hidden)) * scale)


class Apart(Centred):
    """A buffer that forward reads behind layers of another rank."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.keep(hidden.detach().mean(0))
        return self.last(torch.tanh(self.middle(hidden)) - self.centre)


@pytest.mark.parametrize("kind", [Normed, Centred, Replaced, Halfway, Apart])
def test_buffers_of_modules_without_parameters_are_those_of_replicas(kind: Any) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> list[Tensor]:
        plain(model, loss_fn, optimizer, batches)
        model.eval()
        with torch.no_grad():
            seen = model(batches[0][0]) + 0
        model.train()
        return [seen, *(buffer.clone() for buffer in model.buffers())]

    tried = Script(model=built(kind), batches=features(7, 3), loss_fn=F.cross_entropy, loop=loop)
    expected = tried.on_ranks(2, {"*": "replicate"})
    got = tried.on_ranks(2, PINS)
    for (its, its_state), (own, own_state) in zip(expected, got, strict=True):
        assert difference(its_state, own_state) <= 1e-10
        for one, other in zip(its, own, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert difference(state(tried.model), got[0][1]) > 1e-3


@pytest.mark.parametrize("ways", ["local", {"norm.running_*": "local"}])
def test_buffers_that_each_rank_is_to_keep_are_refused(ways: Any) -> None:
    tried = Script(model=built(Normed), batches=features(7, 3), loss_fn=F.cross_entropy)
    with pytest.raises(PlanError, match=r"buffer norm\.running_mean[^$]*leave it out"):
        replace(tried, options={"buffers": ways}).on_ranks(2, PINS)


def test_buffers_that_nobody_changes_may_be_anybodys() -> None:
    tried = Script(model=built(Constant), batches=features(7, 3), loss_fn=F.cross_entropy)
    assert_same(replace(tried, options={"buffers": "local"}), 2, pins=PINS)
