"""Models and loops that hosts at the end of a model refused before, and train now; and the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import Batch, Loop, built, cluster_of, features, plain, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from with_tail import CLASSES, PINS, WIDTH, Net, assert_same, together

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using


def by_another_loss(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, _ in its:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def by_a_target_of_the_model(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, _ in its:
        optimizer.zero_grad()
        (100 * F.mse_loss(model(x), model(x / 2))).backward()
        optimizer.step()


def in_place_and_with_hooks(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        output = model(x)
        output.mul_(0.5)
        output.register_hook(lambda grad: grad * 2)
        F.cross_entropy(output, y).backward()
        optimizer.step()


def with_the_end_by_itself(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    with torch.no_grad():
        assert model.tail(its[0][0]).shape == (len(its[0][0]), CLASSES)
    plain(model, loss_fn, optimizer, its)


TRAIN_NOW: list[Loop] = [
    by_another_loss,
    in_place_and_with_hooks,
    pytest.param(by_a_target_of_the_model, marks=pytest.mark.slow),  # type: ignore[list-item]
    pytest.param(with_the_end_by_itself, marks=pytest.mark.slow),  # type: ignore[list-item]
]


@pytest.mark.parametrize("loop", TRAIN_NOW)
def test_loops_that_were_refused_train(loop: Loop) -> None:
    assert_same(built(Net), loop)


def twice(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    loss = loss_fn(model(its[0][0]), its[0][1])
    loss.backward(retain_graph=True)
    loss.backward()


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "twice": (twice, "second backward"),
    "data": (lambda m, loss_fn, o, its: m.tail[1].weight.data.zero_(), "would not reach the rest"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_use_is_named(wrong: str) -> None:
    loop, words = WRONG[wrong]
    with pytest.raises(UsageError, match=words):
        together(built(Net), loop)


class Halved(Net):
    """What the tail puts out is not what the model returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Turned(Net):
    """Rows are not the first dimension of what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(torch.softmax(x, 0)))


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


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "all layers": (Net, {"pins": {"*": "stage"}}),
    "something after it": (Halved, {}),
    "hooks": (Hooked, {}),
    "a way to share a layer, for one host": (Net, {"pins": {"tail.*": "stage:column"}}),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_were_refused_train(what: str) -> None:
    make, how = MODELS[what]
    assert_same(built(make), workers=2, **how)


CANNOT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "not the end": (Net, {"pins": {"body.*": "stage"}}, "come after layers on hosts"),
    "half of it": (
        Net,
        {"pins": {"tail.1": "stage", "tail.3": "replicate"}},
        r"come after layers on hosts(.|\n)*layer tail.3",
    ),
    "tied": (Tied, {}, r"come after layers on hosts(.|\n)*layer body.0"),
    "a front that is cut": (
        Net,
        {"pins": {"body.*": "column", "tail.*": "stage"}},
        r"column does not serve layers beside those on hosts(.|\n)*replicate",
    ),
    "a loss that learns": (
        Net,
        {"loss_fn": Learning()},
        "the loss has a trainable parameter that is not the model's",
    ),
    "a loss that centres": (Net, {"loss_fn": Centring()}, "does not keep buffers of the loss"),
    "changed by micro-batches": (
        Turned,
        {"micro_batches": 2},
        "cannot cut the batch of a rank into parts(.|\n)*micro_batches=1",
    ),
    "all gradients at once": (
        Net,
        {"optimizer": lambda own: Normalising(own, 0.1)},
        "Normalising updates several",
    ),
    "a second model": (Net, {"loop": second}, "the model that is parallelised first"),
    "no micro-batch": (Net, {"micro_batches": 0}, "micro_batches is a whole number"),
    "no tail hosts": (Net, {"tail": 0}, r"there are no hosts that could run(.|\n)*--tail"),
    "no tail hosts for a strategy": (
        Net,
        {"tail": 0, "pins": None, "strategies": ["stage"]},
        "there are no hosts that could run",
    ),
}


@pytest.mark.parametrize("what", CANNOT)
def test_a_model_that_hosts_cannot_hold_says_why(what: str) -> None:
    make, how, words = CANNOT[what]
    with pytest.raises(UsageError, match=words):
        together(built(make), workers=2, **how)


class Labels:
    """A target that is no plain data."""

    def __init__(self, of_rows: Tensor) -> None:
        self.of_rows = of_rows


def test_a_target_of_a_class_of_its_own_goes_to_the_loss() -> None:
    """Before, it was refused, because it is no plain data."""
    batches = features(WIDTH, CLASSES)
    copies, cluster = [built(Net) for _ in range(3)], replace(cluster_of(2), tail=("tail0",))

    def work(comm: ThreadComm) -> Tensor | None:
        model, (x, y) = copies[comm.rank], batches[comm.rank]
        with using(comm, cluster), suppress(SystemExit):
            model, loss_fn, _ = shoal.parallelize(
                model,
                lambda output, target: F.cross_entropy(output, target.of_rows),
                sgd(model.parameters()),
                sample=(x, Labels(y)),
                pins=PINS,
            )
            loss: Tensor = loss_fn(model(x), Labels(y))
            loss.backward()
            return loss.detach()
        return None

    losses = run(3, work, timeout_s=60, hosts=cluster.topology.hosts + cluster.tail, tail=1)
    for got, (x, y) in zip(losses, batches[:2], strict=False):
        assert torch.allclose(got, F.cross_entropy(built(Net)(x), y))
