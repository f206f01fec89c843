"""Layers of any class that multiply their input with their weight: cut, and served by factors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, TypeVar

import pytest
import torch
from one_process import Training, assert_same, built, cluster_of, features, numbers, rows_of, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.front.session_start import using
from shoal.profiling.layers import profile_model
from shoal.profiling.weight_use import WeightUse
from shoal.session.session import current
from shoal.strategies.factor import Factor
from shoal.strategies.row import Row

T = TypeVar("T")
CLASSES, INPUTS, WIDTH = 5, 6, 7


class Conv1D(nn.Module):
    """The class of that name in transformers: its weight is (inputs, outputs)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Scaled(nn.Linear):
    """Scales, and would draw noise."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__(inputs, outputs)
        self.noise = 0.0

    def forward(self, input: Tensor, scale: float = 0.5) -> Tensor:
        output = scale * super().forward(input / 2).view(-1, self.out_features)
        return output + self.noise * torch.randn_like(output) if self.noise else output


class Own(nn.Module):
    """A weight and a bias of other names, in several spellings."""

    def __init__(self, outputs: int, inputs: int, spelling: str) -> None:
        super().__init__()
        turned = spelling in ("matmul", "einsum io", "mm turned")
        shape = (inputs, outputs) if turned else (outputs, inputs)
        self.kernel = nn.Parameter(torch.randn(shape) / inputs**0.5)
        self.shift = nn.Parameter(torch.randn(outputs))
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        kernel, shift = self.kernel, self.shift
        return {
            "linear": lambda: F.linear(x, kernel, bias=shift),
            "matmul": lambda: x @ kernel + shift,
            "turned": lambda: shift + torch.matmul(x, kernel.T),
            "mm turned": lambda: F.linear(x, kernel.transpose(0, 1), shift),
            "einsum io": lambda: torch.einsum("...i,io->...o", x, kernel).add_(shift),
            "einsum oi": lambda: torch.einsum("oi, bi -> bo", kernel, x) + shift,
        }[self.spelling]()


def own(spelling: str) -> Callable[[int, int], nn.Module]:
    return lambda outputs, inputs: Own(outputs, inputs, spelling)


SPELLINGS = ("linear", "matmul", "turned", "mm turned", "einsum io", "einsum oi")
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "Conv1D": lambda outputs, inputs: Conv1D(outputs, inputs),
    "scaled": Scaled,
    **{spelling: own(spelling) for spelling in SPELLINGS},
}


def two_layers(make: Callable[[int, int], nn.Module]) -> nn.Module:
    return built(lambda: nn.Sequential(make(WIDTH, INPUTS), nn.Tanh(), make(CLASSES, WIDTH)))


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["column", "row", "column_pair", "factor", "head"])
@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_get_what_one_process_gets(layer, way, ranks, uneven):
    training = Training(model=two_layers(LAYERS[layer]), batches=features(INPUTS, CLASSES))
    assert_same(training, ranks, way, uneven=uneven)


class Masked(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 0.5, self.bias)


class Twice(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.weight) ** 2


class Late(Own):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.kernel) + self.shift


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class WithScale(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * super().forward(input)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(INPUTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows[x.argmax(-1)]


class Quiet(Own):
    """Has a bias that it never adds."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


REASONS = {
    "masked": (lambda: Masked(INPUTS, WIDTH), "its weight is read by mul"),
    "without its bias": (lambda: Twice(WIDTH, INPUTS), "its bias is not added right behind"),
    "late": (lambda: Late(WIDTH, INPUTS, "matmul"), "its shift is not added right behind"),
    "both ways": (BothWays, "it multiplies with its weight in several ways"),
    "own scale": (
        lambda: WithScale(INPUTS, WIDTH),
        "it has not just a matrix and a vector, but weight, bias, scale",
    ),
    "table": (Table, "its rows is read by __getitem__"),
    "bias unused": (lambda: Quiet(WIDTH, INPUTS, "matmul"), "its shift is not added"),
    "parametrised": (
        lambda: parametrizations.weight_norm(nn.Linear(INPUTS, WIDTH)),
        "its weight is computed from other parameters",
    ),
    "convolution": (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2)), ""),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_does_more_with_its_weight_is_not_served_and_the_reason_is_told(case):
    make, why = REASONS[case]
    alike = case not in ("own scale", "parametrised", "convolution")
    model = built(lambda: nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(CLASSES)))
    model(numbers(2, INPUTS))
    batch = features(INPUTS, CLASSES)[0]
    profile = profile_model(model, F.cross_entropy, [], batch, ThreadComm())
    uses = {layer.name: layer.measured(WeightUse) for layer in profile.layers}
    name = "0.1" if case == "convolution" else "0"
    assert not uses[name].served and why in uses[name].reason
    assert uses["2"].served
    assert all("forward" not in vars(module) for module in model.modules())
    assert profile.layer(name).measured(WeightUse).like == ("Linear" if alike else "")
    layer, cluster = profile.layer(name), cluster_of(2)
    for strategy in (Row(), Factor()):
        told = strategy.refusal(layer, cluster)
        assert told is not None and (why if alike else "it serves nn.Linear") in told


def on_two_ranks(model: nn.Module, way: str, work: Callable[[Any, Any, Any], T]) -> list[T]:
    """Train copies for a step, and return what a function of model, loss and optimizer returns."""

    def train(comm: ThreadComm) -> T:
        batch = rows_of(features(INPUTS, CLASSES)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            own, loss_fn, optimizer = shoal.parallelize(
                copies[comm.rank],
                F.cross_entropy,
                sgd(copies[comm.rank].parameters()),
                sample=batch,
                pins={"*": way},
            )
            loss_fn(own(batch[0]), batch[1]).backward()
            optimizer.step()
            return work(own, loss_fn, optimizer)

    copies = [deepcopy(model) for _ in range(2)]
    return run(2, train)


@pytest.mark.parametrize("way", ["column", "row", "factor"])
def test_the_layers_are_of_their_own_classes_again(way):
    def work(model: nn.Module, loss_fn: Any, optimizer: Any) -> None:
        kinds = [type(layer) for layer in made]
        assert [type(layer) for layer in model] != kinds
        assert repr(model) == repr(made)
        own = {name: tensor.shape for name, tensor in made.state_dict().items()}
        assert {name: tensor.shape for name, tensor in model.state_dict().items()} == own
        assert [type(layer) for layer in deepcopy(model)] == kinds
        shoal.unparallelize(model)
        assert [type(layer) for layer in model] == kinds
        assert all(type(p) is nn.Parameter for p in model.parameters())

    made = built(
        lambda: nn.Sequential(
            Conv1D(WIDTH, INPUTS), Own(WIDTH, WIDTH, "matmul"), Scaled(CLASSES, WIDTH)
        )
    )
    on_two_ranks(made, way, work)


@pytest.mark.parametrize("way", ["column", pytest.param("row", marks=pytest.mark.slow)])
def test_a_rank_evaluates_alone(way):
    def work(model: nn.Module, loss_fn: Any, optimizer: Any) -> Tensor:
        alone = current().comm.rank == 0
        whole = deepcopy(model)  # of both ranks
        x = numbers(3, INPUTS)
        with torch.no_grad():
            if alone:
                assert torch.allclose(model(x), whole(x), rtol=0, atol=1e-12)
        return loss_fn(model(x[:2]), torch.tensor([0, 1])).detach()

    on_two_ranks(two_layers(LAYERS["Conv1D"]), way, work)


@pytest.mark.parametrize("way", ["factor", "row", pytest.param("column", marks=pytest.mark.slow)])
def test_another_form_than_in_the_sample_is_right_too(way):
    """What the sample did not show is read whole: all ranks do so alike."""

    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(INPUTS, INPUTS))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            is_new = self.training and x.sum() < 0
            return F.linear(x, self.weight if is_new else self.weight.t())

    model = built(lambda: nn.Sequential(Turns(), nn.Tanh(), nn.Linear(INPUTS, CLASSES)))
    batches = features(INPUTS, CLASSES)
    signed = [(x.abs() if number < 2 else -x.abs(), y) for number, (x, y) in enumerate(batches)]
    assert_same(Training(model=model, batches=signed), 2, way)


def test_a_bias_that_is_added_late_after_all_is_an_error():
    class Late(Own):
        def forward(self, x: Tensor) -> Tensor:
            product = x @ self.kernel
            return (torch.tanh(product) if getattr(self, "late", False) else product) + self.shift

    def work(model: nn.Module, loss_fn: Any, optimizer: Any) -> None:
        model[0].late = True
        with pytest.raises(UsageError, match="before it added the bias"):
            model(numbers(2, INPUTS))

    on_two_ranks(built(lambda: nn.Sequential(Late(CLASSES, INPUTS, "matmul"))), "factor", work)


def test_explain_says_once_why_a_layer_is_not_served():
    def work(model: nn.Module, loss_fn: Any, optimizer: Any) -> list[str]:
        return str(shoal.explain(model)).splitlines()

    made = built(lambda: nn.Sequential(Masked(INPUTS, WIDTH), nn.Tanh(), Conv1D(CLASSES, WIDTH)))
    told, _ = on_two_ranks(made, "replicate", work)
    assert "  factor, row, row_pair: its weight is read by mul (0)" in told
    assert not any("factor" in line and "Conv1D" in line for line in told)
