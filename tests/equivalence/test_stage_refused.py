"""What the end of a model on hosts of its own cannot do or be: every wrong use is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    built,
    cluster_of,
    features,
    plain,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from with_tail import (
    CLASSES,
    HIDDEN,
    PINS,
    WIDTH,
    Net,
    together,
)

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import DeadlinePassed, RanksDiffer, UsageError
from shoal.front.session_start import using
from shoal.tensors.cut import cut_of
from shoal_tools.testing.planned_faults import Drop, FaultyComm, NetworkFault

WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "another loss": (
        lambda m, loss_fn, o, its: m(its[0][0]).pow(2).mean().backward(),
        "something else than the loss",
    ),
    "twice": (
        lambda m, loss_fn, o, its: twice(loss_fn(m(its[0][0]), its[0][1])),
        "second backward",
    ),
    "by itself": (lambda m, loss_fn, o, its: m.tail(its[0][0]), "called by itself"),
    "in place": (
        lambda m, loss_fn, o, its: m(its[0][0]).mul_(2),
        "mul_ on an output of tail hosts",
    ),
    "an item": (
        lambda m, loss_fn, o, its: m(its[0][0]).__setitem__(0, 1.0),
        "__setitem__ on an output of tail hosts",
    ),
    "a hook": (
        lambda m, loss_fn, o, its: m(its[0][0]).register_hook(print),
        "register_hook on an output",
    ),
    "a target": (
        lambda m, loss_fn, o, its: loss_fn(m(its[0][0]), m(its[0][0])),
        "beside the output that takes a grad",
    ),
    "hooks": (
        lambda m, loss_fn, o, its: hooked(m)(its[0][0]),
        "has a hook, which would not be called",
    ),
    "data": (lambda m, loss_fn, o, its: m.tail[1].weight.data.zero_(), "would not reach the rest"),
}


def hooked(model: Any) -> Any:
    model.tail[3].register_forward_hook(print)
    return model


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_use_is_named(wrong: str) -> None:
    loop, words = WRONG[wrong]
    with pytest.raises(UsageError, match=words):
        together(built(Net), loop)


def alone(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Rank 0 evaluates by itself."""
    plain(model, loss_fn, optimizer, its[:1])
    if shoal.world().rank == 0:
        with torch.no_grad():
            model(its[0][0])
    plain(model, loss_fn, optimizer, its[1:])


def test_a_rank_that_does_something_else_is_named() -> None:
    with pytest.raises(
        RanksDiffer, match=r"rank 1 is at .* where rank 0 is at Output of forward 2"
    ):
        together(built(Net), alone)


class Halved(Net):
    """What the tail puts out is not what the model returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Normed(Net):
    """A tail with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[2] = nn.BatchNorm1d(HIDDEN)


class Turned(Net):
    """Rows are not the first dimension of what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(torch.softmax(x, 0)))


class NormedBody(Net):
    """Statistics of micro-batches would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = nn.BatchNorm1d(HIDDEN)


class Hooked(Net):
    """Somebody looks into its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[1].register_forward_pre_hook(lambda module, args: None)


class Normalising(torch.optim.SGD):
    """Looks at all gradients at once."""

    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        clip = torch.nn.utils.clip_grad_norm_(own, 1.0)
        assert clip.isfinite()
        super().step()


def second(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    other = built(Net)
    shoal.parallelize(other, loss_fn, sgd(other.parameters()), sample=its[0], pins=PINS)


class Tied(Net):
    """A tail with a parameter of the body's."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[3].bias = self.body[0].bias


class Learning(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


class Centring(nn.Module):
    """A loss that changes its own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.center.lerp_(output.detach().mean(0), 0.1)
        return F.cross_entropy(output - self.center, target)


SCALE = nn.Parameter(torch.ones((), dtype=torch.float64))
CANNOT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "not the end": (
        Net,
        {"pins": {"body.*": "stage"}},
        "no module that has it puts out what the model returns",
    ),
    "half of it": (
        Net,
        {"pins": {"tail.1": "stage", "tail.3": "replicate"}},
        "stage serves layer tail.1 only beside",
    ),
    "something behind it": (Halved, {}, "no module that has it puts out what the model returns"),
    "buffers": (Normed, {}, "has buffers"),
    "tied": (Tied, {}, "tied to"),
    "a loss that learns": (
        Net,
        {"loss_fn": Learning()},
        "the loss has a trainable parameter that is not the model's",
    ),
    "a loss that reads a parameter": (
        Net,
        {"loss_fn": lambda output, target: F.cross_entropy(output * SCALE, target)},
        "the loss reads parameters itself",
    ),
    "a loss that centres": (Net, {"loss_fn": Centring()}, "the loss changes its buffers"),
    "changed by micro-batches": (Turned, {}, "micro_batches=1 does not cut the batch"),
    "normalised in batches": (NormedBody, {}, "micro_batches=1 does not cut the batch"),
    "hooks": (Hooked, {}, "has hooks"),
    "all gradients at once": (
        Net,
        {"optimizer": lambda own: Normalising(own, 0.1)},
        "Normalising updates several",
    ),
    "a second model": (Net, {"loop": second}, "the model that is parallelised first"),
    "its own loss": (Net, {"loss_fn": None}, "loss"),
    "shared by one": (Net, {"pins": {"tail.*": "stage:column"}}, "one tail host shares layer"),
    "shared by what is no way": (
        Net,
        {"pins": {"tail.*": "stage:head"}, "tail": 2},
        "cannot share layer",
    ),
    "shared by nothing there is": (Net, {"pins": {"tail.*": "stage:coloumn"}, "tail": 2}, "column"),
    "no micro-batch": (Net, {"micro_batches": 0}, "micro_batches is a whole number"),
    "no tail hosts": (Net, {"tail": 0}, "there are no tail hosts"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_a_tail_says_why(what: str) -> None:
    make, how, words = CANNOT[what]
    with pytest.raises(UsageError, match=words):
        together(built(make), **how)


class Labels:
    """A target that is no plain data."""

    def __init__(self, of_rows: Tensor) -> None:
        self.of_rows = of_rows


def test_a_target_that_cannot_be_sent_is_refused_before_the_first_step() -> None:
    (x, y), *_ = features(WIDTH, CLASSES)
    copies, cluster = [built(Net) for _ in range(3)], replace(cluster_of(2), tail=("tail0",))

    def work(comm: ThreadComm) -> None:
        model = copies[comm.rank]
        with using(comm, cluster), suppress(SystemExit):
            shoal.parallelize(
                model,
                lambda output, target: F.cross_entropy(output, target.of_rows),
                sgd(model.parameters()),
                sample=(x, Labels(y)),
                pins=PINS,
            )

    with pytest.raises(UsageError, match=r"the target has a .*Labels in it, which cannot be sent"):
        run(3, work, timeout_s=10, hosts=cluster.topology.hosts + cluster.tail, tail=1)


def faulty(fault: NetworkFault, tail: int = 1) -> None:
    """Two workers and a tail train with a fault."""
    batches, copies = features(WIDTH, CLASSES), [built(Net) for _ in range(2 + tail)]
    cluster = replace(cluster_of(2), tail=tuple(f"tail{t}" for t in range(tail)))

    def work(comm: ThreadComm) -> None:
        model = copies[comm.rank]
        own = [rows_of(batch, comm.rank % 2, 2) for batch in batches]
        state_of = FaultyComm(comm, [])
        with using(state_of, cluster), suppress(SystemExit):
            optimizer = sgd(model.parameters())
            _, loss_fn, _ = shoal.parallelize(
                model, F.cross_entropy, optimizer, sample=own[0], pins=PINS
            )
            plain(model, loss_fn, optimizer, own[:1])
            if comm.rank == fault.rank:
                hosts = cut_of(model.tail[1].weight).tail.hosts
                hosts.channel.comm = FaultyComm(hosts.channel.comm, [fault])
            plain(model, loss_fn, optimizer, own[1:])

    run(2 + tail, work, timeout_s=2, hosts=cluster.topology.hosts + cluster.tail, tail=tail)


def test_a_micro_batch_that_does_not_come_is_named_by_its_key() -> None:
    with pytest.raises(
        DeadlinePassed,
        match=r"micro-batch [01] of forward 2 has not come from rank 1 within 1\.5 s",
    ):
        faulty(Drop(rank=1, at=4))
