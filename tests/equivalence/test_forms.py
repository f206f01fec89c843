"""Inputs and outputs in every form: tuples, dicts, objects, a model that returns its own loss."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from one_process import (
    AMONG_WORKERS,
    CUTS,
    UNEVEN,
    Batch,
    Training,
    assert_same,
    built,
    call,
    cluster_of,
    difference,
    features,
    integers,
    numbers,
    on_threads,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import SampleError
from shoal.front.session_start import using


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
        if self.form == "tuple":
            return logits, loss
        if self.form == "loss first":
            return [loss, logits, None, loss.detach()]
        output = AsObject(logits)
        output.loss = loss
        return output


def own_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return output[isinstance(output, tuple)]
    return output["loss"] if isinstance(output, dict) else output.loss


def train_on_own_loss(model, loss_fn, optimizer, batches):
    assert loss_fn is None
    for x, _ in batches:
        optimizer.zero_grad()
        own_loss(call(model, x)).backward()
        optimizer.step()


@UNEVEN
@pytest.mark.parametrize("form", ["scalar", "dict", "object", "tuple", "loss first"])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_model_that_returns_its_own_loss(way, form, uneven):
    batches = [({"features": x, "labels": y}, None) for x, y in features(7, 3)]
    training = Training(
        model=built(lambda: OwnLoss(form)), batches=batches, loss_fn=None, loop=train_on_own_loss
    )
    assert_same(training, 3, way, uneven=uneven)


@UNEVEN
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_loss_that_is_taken_out_of_the_output(way, uneven):
    """As of a model that takes (x, y) and returns (logits, loss); the loop calls no loss."""

    def loop(model, loss_fn, optimizer, batches):
        for (x, y), _ in batches:
            _, loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    batches = [((x, y), y) for x, y in features(7, 3)]
    training = Training(
        model=built(lambda: OwnLoss("tuple")),
        batches=batches,
        loss_fn=lambda out, y: out[1],
        loop=loop,
    )
    assert_same(training, 3, way, uneven=uneven)


def test_two_losses_in_a_tuple_are_refused_with_the_way_out():
    class Two(OwnLoss):
        def forward(self, features: Tensor, labels: Tensor) -> Any:
            logits, loss = super().forward(features, labels)
            return logits, loss, loss * 2

    def loop(*_: Any) -> None:
        raise AssertionError("it was not refused")

    batches = [((x, y), None) for x, y in features(7, 3)]
    training = Training(model=built(lambda: Two("tuple")), batches=batches, loss_fn=None, loop=loop)
    with pytest.raises(SampleError, match=r"lambda out, y: out\[1\]"):
        training.on_ranks(2)


class Pair(NamedTuple):
    """Two inputs in one."""

    a: Tensor
    b: Tensor


class OfPair(TwoInputs):
    def forward(self, pair: Pair) -> Tensor:
        return super().forward(pair.a, pair.b)


class OfBoth(TwoInputs):
    """Takes the fields of a namedtuple."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a, b)


@UNEVEN
@pytest.mark.parametrize("kind", [OfPair, OfBoth])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_a_namedtuple_is_one_input_unless_forward_takes_its_fields(way, kind, uneven):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            loss = loss_fn(model(x) if kind is OfPair else model(*x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def x(step: int) -> Pair:
        return Pair(numbers(12, 4, seed=step), numbers(12, 5, seed=step + 30))

    batches = [(x(step), integers(3, 12, seed=step)) for step in range(5)]
    training = Training(model=built(kind), batches=batches, loop=loop)
    assert_same(training, 3, way, uneven=uneven)


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(7, 5), nn.Linear(5, 3)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.rnn(packed)[1][-1])


@pytest.mark.filterwarnings("ignore:RNN module weights")  # of a copy on a GPU
@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_a_packed_sequence_is_one_input(way):
    def work(comm: ThreadComm) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        with using(comm, cluster_of(2)):
            own = [packed(rows_of(batch, comm.rank, 2, True)) for batch in batches]
            optimizer = sgd(model.parameters())
            _, loss_fn, _ = shoal.parallelize(
                model,
                F.cross_entropy,
                optimizer,
                sample=own[0],
                pins={"*": way},
                count=lambda output, y: len(y),
            )
            plain_packed(model, loss_fn, optimizer, own)
            return state(model)

    def packed(batch: Batch) -> Batch:
        x, y = batch
        return pack_sequence(
            [row[: 1 + int(label)] for row, label in zip(x, y, strict=True)], False
        ), y

    def plain_packed(model: Any, loss_fn: Any, optimizer: Any, steps: list[Batch]) -> None:
        for x, y in steps:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    batches = [(numbers(12, 3, 7, seed=s), integers(3, 12, seed=s)) for s in range(5)]
    start = built(OfPacked)
    alone = copy.deepcopy(start)
    plain_packed(alone, F.cross_entropy, sgd(alone.parameters()), list(map(packed, batches)))
    states = on_threads(2, work)
    assert difference(state(alone), states[0]) < 1e-10


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
