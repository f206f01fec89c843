"""Inputs and outputs in every form: tuples, dicts, objects, a model that returns its own loss."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    UNEVEN,
    Training,
    assert_same,
    built,
    call,
    features,
    integers,
    numbers,
)
from torch import Tensor, nn
from torch.nn import functional as F


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.left(a)) * self.right(b) * scale


@UNEVEN
@pytest.mark.parametrize("form", [tuple, dict])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_inputs(way, form, uneven):
    def x(step: int) -> Any:
        a, b = numbers(12, 4, seed=step), numbers(12, 5, seed=step + 30)
        return (a, b, 2.0) if form is tuple else {"b": b, "a": a, "scale": 2.0}

    batches = [(x(step), integers(3, 12, seed=step)) for step in range(5)]
    assert_same(Training(model=built(TwoInputs), batches=batches), 3, way, uneven=uneven)


@dataclass
class AsDataclass:
    logits: Tensor


class AsObject:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.name = "an output class that nobody has heard of"


class AsOrderedDict(OrderedDict):
    """A mapping of a class of its own, as language model libraries return."""


AsNamedTuple = namedtuple("AsNamedTuple", ["logits"])
OUTPUTS = {
    "tuple": lambda h: (h, None),
    "list": lambda h: [{"logits": h}],
    "dict": lambda h: {"logits": h},
    "mapping": lambda h: AsOrderedDict(logits=h),
    "namedtuple": AsNamedTuple,
    "dataclass": AsDataclass,
    "object": AsObject,
    "distribution": lambda h: torch.distributions.Categorical(logits=h, validate_args=False),
}


def logits_of(output: Any) -> Tensor:
    while isinstance(output, tuple | list) and not hasattr(output, "logits"):
        output = output[0]
    return output["logits"] if isinstance(output, dict) else getattr(output, "logits", output)


class Giving(nn.Module):
    """Gives its output in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.form](self.body(x))


@UNEVEN
@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_outputs(way, form, uneven):
    def loss_fn(output, y):
        return F.cross_entropy(logits_of(output), y)

    training = Training(model=built(lambda: Giving(form)), batches=features(7, 3), loss_fn=loss_fn)
    assert_same(training, 3, way, uneven=uneven)


class Inner(nn.Module):
    """Gives a hidden layer beside the logits that are made of it, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.hidden(x))
        return {"hidden": hidden, "again": hidden, "logits": self.head(hidden), "input": x}


@UNEVEN
def test_an_output_that_another_is_made_of(uneven):
    def loss_fn(output, y):
        return (
            F.cross_entropy(output["logits"], y)
            + output["hidden"].square().mean()
            + output["again"].mean()
        )

    assert_same(
        Training(model=built(Inner), batches=features(7, 3), loss_fn=loss_fn), uneven=uneven
    )


class OwnLoss(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.fc = nn.Linear(7, 3)

    def forward(self, features: Tensor, labels: Tensor) -> Any:
        logits = self.fc(features)
        loss = F.cross_entropy(logits, labels)
        if self.form == "scalar":
            return loss
        if self.form == "dict":
            return {"logits": logits, "loss": loss}
        output = AsObject(logits)
        output.loss = loss
        return output


def own_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


def train_on_own_loss(model, loss_fn, optimizer, batches):
    assert loss_fn is None
    for x, _ in batches:
        optimizer.zero_grad()
        own_loss(call(model, x)).backward()
        optimizer.step()


@UNEVEN
@pytest.mark.parametrize("form", ["scalar", "dict", "object"])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_model_that_returns_its_own_loss(way, form, uneven):
    batches = [({"features": x, "labels": y}, None) for x, y in features(7, 3)]
    training = Training(
        model=built(lambda: OwnLoss(form)), batches=batches, loss_fn=None, loop=train_on_own_loss
    )
    assert_same(training, 3, way, uneven=uneven)


@pytest.mark.parametrize("form", ["scalar", "dict", "object"])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_its_own_loss_counted_otherwise(way, form):
    batches = []
    for step, (x, y) in enumerate(features(7, 3)):
        labels = y.masked_fill(integers(3, 12, seed=step + 20) == 0, -100)
        batches.append(({"features": x, "labels": labels}, None))
    training = Training(
        model=built(lambda: OwnLoss(form)),
        batches=batches,
        loss_fn=None,
        loop=train_on_own_loss,
        count=lambda output, called_with: (called_with["labels"] != -100).sum(),
    )
    assert_same(training, 3, way)


class Graph:
    """An input in which nobody finds a tensor."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class OnGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, graph: Graph) -> Tensor:
        return self.fc(graph.nodes)


def test_an_input_of_an_unknown_class():
    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on_graphs = OnGraphs()

        def forward(self, x: Any) -> Tensor:
            return self.on_graphs(x if isinstance(x, Graph) else Graph(x))

    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(Graph(x)), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Nodes), batches=features(7, 3), loop=loop))
