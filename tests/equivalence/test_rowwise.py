"""Layers cut by outputs that are not plain linear ones: convolutions, and classes with a forward of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from pathlib import Path

import pytest
import torch
from one_process import (
    Batch,
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    numbers,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, RanksDiffer
from shoal.core.facts import ModelProfile
from shoal.front.recipe import load
from shoal.front.session_start import using
from shoal.profiling.layers import profile_model
from shoal.strategies.cut_layers import CutFacts

EXAMPLES = Path(__file__).parents[2] / "examples"

CLASSES, CHANNELS, SIDE, ROWS = 7, 5, 6, 12
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 4])
OPTIMIZER = pytest.mark.parametrize("optimizer", [sgd, adamw])


class Cosine(nn.Linear):
    """The cosine of the angle between a row and each class's own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1), self.bias)


class Mixed(nn.Linear):
    """Every output depends on all rows of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.softmax(0), self.bias)


def arcface(cosines: Tensor, y: Tensor) -> Tensor:
    return load(EXAMPLES / "arcface.py").loss()(cosines, y)


def pictures() -> list[Batch]:
    return [
        (numbers(ROWS, 3, SIDE, SIDE, seed=s), integers(CLASSES, ROWS, seed=s)) for s in range(5)
    ]


CONVOLUTIONS: dict[str, Callable[[], nn.Conv2d]] = {
    "plain": lambda: nn.Conv2d(3, CHANNELS, 3),
    "no bias": lambda: nn.Conv2d(3, CHANNELS, 3, bias=False),
    "stride and padding": lambda: nn.Conv2d(
        3, CHANNELS, (3, 2), stride=2, padding=1, padding_mode="reflect"
    ),
    "one pixel": lambda: nn.Conv2d(3, CHANNELS, 1),
}


def convolutional(conv: Callable[[], nn.Conv2d]) -> nn.Module:
    def make() -> nn.Module:
        body = nn.Sequential(nn.Conv2d(3, 3, 1), conv(), nn.Tanh(), nn.Flatten())
        with torch.no_grad():
            width = body(torch.zeros(1, 3, SIDE, SIDE)).shape[1]
        return nn.Sequential(body, nn.Linear(width, CLASSES))

    return built(make)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("conv", CONVOLUTIONS)
def test_convolutions_are_cut_by_channels(conv, uneven):
    training = Training(model=convolutional(CONVOLUTIONS[conv]), batches=pictures())
    assert_same(training, 3, "column", uneven=uneven)


@RANKS
@OPTIMIZER
def test_convolutions_on_any_number_of_ranks(ranks, optimizer):
    model = convolutional(lambda: nn.Conv2d(3, CHANNELS, 3))
    assert_same(Training(model=model, batches=pictures(), optimizer=optimizer), ranks, "column")


def test_channels_last_and_a_convolution_called_twice():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
            self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(memory_format=torch.channels_last)
            return self.head(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))

    assert_same(Training(model=built(Twice), batches=pictures()), 3, "column")


def cosine(kind: type[nn.Linear] = Cosine, *, bias: bool = False) -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), kind(8, CLASSES, bias=bias)))


@RANKS
@OPTIMIZER
@pytest.mark.parametrize("way", ["column", "head"])
def test_a_head_of_cosines_with_a_margin(way, ranks, optimizer):
    training = Training(
        model=cosine(), batches=features(6, CLASSES), loss_fn=arcface, optimizer=optimizer
    )
    assert_same(training, ranks, way)


@pytest.mark.parametrize("way", ["column", "head"])
def test_its_bias_is_cut_too(way):
    training = Training(model=cosine(bias=True), batches=features(6, CLASSES))
    assert_same(training, 3, way, uneven=True)


def profile(model: nn.Module, batch: Batch) -> ModelProfile:
    return profile_model(model, F.cross_entropy, [], batch, ThreadComm())


def test_what_is_cut_by_outputs_is_found_by_trying():
    class WithScale(Cosine):
        """Another parameter beside weight and bias."""

        def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
            super().__init__(inputs, outputs, bias)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, input: Tensor) -> Tensor:
            return self.scale * super().forward(input)

    class Fails(nn.Linear):
        """Knows how many outputs there are."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).view(-1, self.out_features)

    class Grouped(nn.Linear):
        """Halves agree, thirds do not."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / (2 - self.weight.shape[0] % 2)

    class Centred(nn.Linear):
        """Starts at 0, where every part agrees with the whole."""

        def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
            super().__init__(inputs, outputs, bias)
            nn.init.zeros_(self.weight)

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight - self.weight.mean(0))

    class MaxNorm(nn.Linear):
        """Changes its weight behind autograd's back."""

        def forward(self, input: Tensor) -> Tensor:
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
            return super().forward(input)

    class Optional(nn.Linear):
        """May be called with more than in the sample."""

        def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().forward(input)

    class OverTokens(nn.Linear):
        """Looks at rows together."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input - input.mean(0))

    refused = (Mixed, WithScale, Fails, Grouped, Centred, MaxNorm, Optional, OverTokens)
    for kind, found in ((nn.Linear, True), (Cosine, True), *((kind, False) for kind in refused)):
        model = cosine(kind)
        before = deepcopy(model.state_dict())
        layers = {layer.name: layer for layer in profile(model, features(6, CLASSES)[0]).layers}
        assert layers["2"].measured(CutFacts).rowwise is found, kind
        assert layers["0"].measured(CutFacts).rowwise
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert isinstance(model[2].weight, nn.Parameter)
        assert model[2].weight.requires_grad
    grouped = convolutional(lambda: nn.Conv2d(3, 6, 3, groups=3))
    found_of = [layer.measured(CutFacts) for layer in profile(grouped, pictures()[0]).layers]
    assert [facts.rowwise for facts in found_of] == [True, False, True]


@pytest.mark.parametrize(
    ("make", "batch", "pin", "why"),
    [
        (
            lambda: cosine(Mixed),
            features(6, CLASSES)[0],
            {"2": "column"},
            "not exactly a torch.nn.Linear",
        ),
        (
            lambda: cosine(),
            features(6, CLASSES)[0],
            {"2": "row"},
            "its weight is read by normalize",
        ),
        (
            lambda: cosine(),
            features(6, CLASSES)[0],
            {"2": "factor"},
            "its weight is read by normalize",
        ),
        (
            lambda: convolutional(lambda: nn.Conv2d(3, 6, 3, groups=3)),
            pictures()[0],
            {"0.1": "column"},
            "one row of the weight",
        ),
    ],
)
def test_others_are_refused(make, batch, pin, why):
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(2)):
            model = deepcopy(made)
            with pytest.raises(PlanError, match=why):
                shoal.parallelize(
                    model,
                    F.cross_entropy,
                    sgd(model.parameters()),
                    sample=batches[comm.rank],
                    pins=pin,
                )

    made = make()
    batches = [tuple(tensor[rank::2] for tensor in batch) for rank in range(2)]
    run(2, work)


def test_copies_and_pickles_are_ordinary_layers():
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(2)):
            model = deepcopy(made)
            mine = [(x[comm.rank :: 2], y[comm.rank :: 2]) for x, y in batches]
            shoal.parallelize(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=mine[0],
                pins={"0.1": "column"},
            )
            assert type(model[0][1]) is not nn.Conv2d
            assert repr(model) == repr(made)
            copy = deepcopy(model)
            assert type(copy[0][1]) is nn.Conv2d
            assert torch.equal(copy[0][1].weight, made[0][1].weight)
            assert torch.allclose(copy(mine[0][0]), model(mine[0][0]))
            read = torch.load(BytesIO(pickled(model)), weights_only=False)
            assert type(read[0][1]) is nn.Conv2d
            assert torch.equal(read[0][1].weight, made[0][1].weight)

    def pickled(model: nn.Module) -> bytes:
        buffer = BytesIO()
        torch.save(model, buffer)
        return buffer.getvalue()

    made, batches = convolutional(lambda: nn.Conv2d(3, CHANNELS, 3)), pictures()
    run(2, work)


def test_pictures_of_different_sizes_are_an_error():
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(2)):
            model = deepcopy(made)
            x, y = numbers(4, 3, SIDE, SIDE), integers(CLASSES, 4)
            pins = {"*": "replicate", "0": "column"}
            shoal.parallelize(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=(x + comm.rank, y),
                pins=pins,
            )
            with pytest.raises(RanksDiffer, match=r"rows of \(3, 8, 4\)"):
                model(numbers(2, 3, *(4, 8)[:: 1 - 2 * comm.rank], seed=comm.rank))

    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))
    made = built(lambda: nn.Sequential(nn.Conv2d(3, CHANNELS, 3), *pooled))
    run(2, work)


def test_rows_of_tokens():
    class Tokens(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.view(-1, 2, 6)).sum(1)

    model = built(lambda: Tokens(nn.Linear(6, 8), nn.Tanh(), Cosine(8, CLASSES)))
    batches = features(12, CLASSES)
    assert_same(Training(model=model, batches=batches), 3, "column", uneven=True)
