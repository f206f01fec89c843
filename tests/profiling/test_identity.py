"""Two models have one digest exactly when a plan for the one fits the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from profiled_models import Image
from torch import nn

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.profiling.identity import (
    layer_signatures,
    model_digest,
    require_same_model,
    trainable_layers,
)


def tie(model: Image) -> None:
    model.frozen.bias = model.grouped.bias


def test_the_digest_depends_on_no_value() -> None:
    torch.manual_seed(1)
    first = Image()
    assert model_digest(first) == model_digest(Image())
    assert model_digest(first) == model_digest(first.eval())


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (lambda model: setattr(model, "head", nn.Linear(6, 4)), "head"),
        (lambda model: setattr(model, "head", nn.Linear(6, 3, bias=False)), "head"),
        (lambda model: model.head.double(), "head"),
        (lambda model: model.head.weight.requires_grad_(False), "head"),
        (
            lambda model: setattr(model, "norm", nn.BatchNorm2d(4, track_running_stats=False)),
            "norm",
        ),
        (lambda model: setattr(model, "norm", nn.SyncBatchNorm(4)), "norm"),
        (tie, "frozen"),
    ],
    ids=["shape", "bias", "dtype", "frozen", "buffers", "type", "tied"],
)
def test_a_change_shows_in_its_layer_and_in_the_digest(
    change: Callable[[Image], object], layer: str
) -> None:
    before, after = Image(), Image()
    change(after)
    assert model_digest(before) != model_digest(after)
    old, new = layer_signatures(before), layer_signatures(after)
    assert {name for name in old if old[name] != new[name]} == {layer}


def test_layers_own_every_trainable_parameter_once() -> None:
    model = Image()
    owned = [name for layer in trainable_layers(model) for name in layer.parameters]
    assert sorted(owned) == sorted(name for name, p in model.named_parameters() if p.requires_grad)


def test_a_model_on_another_kind_of_device_is_refused() -> None:
    def work(comm: ThreadComm) -> None:
        model = nn.Linear(2, 2, device="cpu" if comm.rank == 0 else "meta")
        with pytest.raises(RanksDiffer, match=r"rank 1(.|\n)*got: meta\n(.|\n)*cpu"):
            require_same_model(model, comm)

    run(2, work)
