"""Two linear layers with the width between them cut: whatever stands between, and where they cannot
be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    features,
    numbers,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import Hub, ThreadComm, run
from shoal.core.errors import PlanError
from shoal.front.session_start import using
from shoal.profiling.layers import profile_model
from shoal.strategies.pair import PairFacts
from shoal.tensors.boundary import CallRows
from shoal.tensors.cut_output import CutOutput

WIDTH, CLASSES = 9, 5
Between = Callable[[Tensor], Tensor]
PAIR = {"*": "replicate", "first": "column_pair", "second": "row_pair"}


class Net(nn.Module):
    """Two layers with something between."""

    def __init__(self, between: Between, *, bias: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 6)
        self.first, self.second = (
            nn.Linear(6, WIDTH, bias=bias),
            nn.Linear(WIDTH, CLASSES, bias=bias),
        )
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(torch.tanh(self.enter(x)))))


KEPT: dict[str, Between] = {
    "nothing": lambda h: h,
    "relu in place": nn.ReLU(inplace=True),
    "gelu": nn.GELU(approximate="tanh"),
    "modules": nn.Sequential(nn.Identity(), nn.SiLU(), nn.Dropout(0.0), nn.Hardtanh()),
    "scaled": lambda h: (h * 0.5 + 1).clamp(min=0),
    "views": lambda h: F.relu(h.view(2, -1, WIDTH)).flatten(0, 1),
    "no dropout in evaluation": lambda h: F.dropout(h, 0.5, training=False),
}
OTHERWISE: dict[str, Between] = {
    "softmax": lambda h: h.softmax(-1),
    "norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "residual": lambda h: h + h.mean(-1, keepdim=True),
    "other order": lambda h: h.flip(0).flip(0),
    "turned": lambda h: h[list(range(len(h)))[::-1]][list(range(len(h)))[::-1]],
    "part": lambda h: F.pad(h[:, 1:], (0, 1)),
}


def paired(model: nn.Module) -> dict[str, str]:
    """Which layer feeds which, as the profile finds it."""
    profile = profile_model(model, F.cross_entropy, [], features(7, CLASSES)[0], ThreadComm())
    facts = {layer.name: layer.measured(PairFacts) for layer in profile.layers}
    feeds = {name: pair.feeds for name, pair in facts.items() if pair.feeds}
    assert {pair.fed_by: name for name, pair in facts.items() if pair.fed_by} == feeds
    return feeds


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("between", KEPT)
def test_what_stands_between(between, uneven):
    model = built(lambda: Net(KEPT[between], bias=between != "gelu"))
    assert paired(model)["first"] == "second"
    assert_same(
        Training(model=model, batches=features(7, CLASSES)),
        2 if between == "views" else 3,
        "column_pair",
    )


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks(ranks, optimizer):
    model = built(lambda: Net(torch.relu))
    assert_same(
        Training(model=model, batches=features(7, CLASSES), optimizer=optimizer),
        ranks,
        "column_pair",
    )


@pytest.mark.parametrize("between", ["softmax", "norm", "residual", "part"])
def test_what_needs_all_of_a_row_is_no_pair(between):
    assert "first" not in paired(built(lambda: Net(OTHERWISE[between])))


def test_layers_that_go_elsewhere_or_come_from_elsewhere_are_no_pair():
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(torch.tanh(self.enter(x)))
            return self.second(hidden) + hidden[:, :CLASSES].sum(-1, keepdim=True)

    class Alike(Net):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.enter(x))
            return self.second(self.first(hidden)) + self.second(F.pad(hidden, (0, WIDTH - 6)))

    assert "first" not in paired(built(lambda: Twice(torch.relu)))
    assert "first" not in paired(built(lambda: Alike(torch.relu)))


@pytest.mark.parametrize("between", OTHERWISE)
def test_what_the_sample_does_not_show_is_right_all_the_same(between):
    """The sample had relu between; in training there is something else."""

    def loop(model, loss_fn, optimizer, batches):
        model.between = OTHERWISE[between]
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    training = Training(
        model=built(lambda: Net(torch.relu)), batches=features(7, CLASSES), loop=loop
    )
    assert_same(training, 3, "column_pair", uneven=True)


def test_rows_in_another_order():
    def loop(model, loss_fn, optimizer, batches):
        model.between = lambda h: h[list(range(len(h)))[::-1]]
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y.flip(0)).backward()
            optimizer.step()

    training = Training(
        model=built(lambda: Net(torch.relu)), batches=features(7, CLASSES), loop=loop
    )
    assert_same(training, 3, "column_pair", uneven=True)


class Scaled(nn.Module):
    """Relu of what a learned number scales, once it is on."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.scale = on, nn.Parameter(torch.tensor(1.3))

    def forward(self, h: Tensor) -> Tensor:
        return torch.relu(h * self.scale if self.on else h)


def test_a_learned_number_gets_the_gradient_of_every_column():
    assert "first" not in paired(built(lambda: Net(Scaled(on=True))))

    def loop(model, loss_fn, optimizer, batches):
        model.between.on = True
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    training = Training(
        model=built(lambda: Net(Scaled(on=False))), batches=features(7, CLASSES), loop=loop
    )
    assert_same(training, 3, "column_pair")


def test_the_hidden_width_is_not_gathered(monkeypatch):
    monkeypatch.setattr(CutOutput, "whole", lambda self: pytest.fail("gathered"))
    assert_same(
        Training(model=built(lambda: Net(torch.relu)), batches=features(7, CLASSES)),
        3,
        "column_pair",
    )


def refusal(pins: dict[str, str], between: Between = torch.relu) -> str:
    """What a user is told."""
    models = [built(lambda: Net(between)) for _ in range(2)]

    def work(comm: ThreadComm) -> None:
        sample: Any = rows_of(features(7, CLASSES)[0], comm.rank, 2)
        model = models[comm.rank]
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=sample, pins=pins
            )

    with pytest.raises(PlanError) as caught:
        run(2, work, timeout_s=20)
    return str(caught.value)


def test_half_a_pair_is_refused():
    told = refusal({"first": "column_pair", "second": "replicate"})
    assert "column_pair serves layer first only beside row_pair for layer second" in told


def test_layers_that_are_no_pair_are_refused():
    assert "does not go to one linear layer alone" in refusal(
        {"first": "column_pair"}, lambda h: h.softmax(-1)
    )
    assert "does not come from one linear layer alone" in refusal(
        {"second": "row_pair"}, lambda h: h.softmax(-1)
    )


def test_one_pin_is_enough_for_both():
    models = [built(lambda: Net(torch.relu)) for _ in range(2)]

    def work(comm: ThreadComm) -> dict[str, str]:
        model = models[comm.rank]
        with using(comm, cluster_of(2)) as session:
            sample: Any = rows_of(features(7, CLASSES)[0], comm.rank, 2)
            shoal.parallelize(
                model,
                F.cross_entropy,
                sgd(model.parameters()),
                sample=sample,
                pins={"second": "row_pair"},
            )
            return {
                choice.layer: choice.strategy for choice in session.attached[model].plan.choices
            }

    assert (
        run(2, work, timeout_s=20)[0].items()
        >= {"first": "column_pair", "second": "row_pair"}.items()
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_keeps_the_mean_and_draws_other_numbers_on_other_ranks(inplace):
    def work(rank: int) -> Tensor:
        part = numbers(400, 50).abs() + 1
        output = CutOutput.of(
            part.clone(), CallRows(ThreadComm(rank, Hub(2)), (400,)), (50,), torch.arange(400)
        )
        torch.manual_seed(0)
        dropped = F.dropout(output, 0.3, inplace=inplace)
        return dropped._part / part

    masks = [work(0), work(0), work(1)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])
    for mask in masks:
        assert set(mask.unique().round(decimals=6).tolist()) == {0.0, round(1 / 0.7, 6)}
        assert abs(mask.mean() - 1) < 0.02
    assert abs(torch.corrcoef(torch.stack([masks[0].flatten(), masks[2].flatten()]))[0, 1]) < 0.03
