"""Activation checkpointing: forward runs again within backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from one_process import (
    CUTS,
    EVERY_RANK,
    UNEVEN,
    WAYS,
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    mlp,
    on_threads,
    plain,
    sgd,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.core.errors import PlanError
from shoal.front.session_start import using

WAY = pytest.mark.parametrize("way", EVERY_RANK)


def checkpointed(block, x, use_reentrant):
    """Without the random state: threads that save torch's at once can lock each other out for
    good.
    """
    return checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)


class Checkpointed(nn.Module):
    """Two checkpointed blocks, and a layer outside of them unless `whole`."""

    def __init__(self, use_reentrant: bool, whole: bool = False) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(7, 5), nn.Tanh()),
            nn.Sequential(nn.Linear(5, 5), nn.Tanh()),
        )
        self.head = nn.Linear(5, 3)
        self.use_reentrant, self.whole = use_reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # or the reentrant kind would not train the first block
        h = checkpointed(self.first, x, self.use_reentrant)
        h = checkpointed(self.second, h, self.use_reentrant)
        return checkpointed(self.head, h, self.use_reentrant) if self.whole else self.head(h)


@UNEVEN
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@WAY
def test_activation_checkpointing(way, use_reentrant, whole, uneven):
    model = built(lambda: Checkpointed(use_reentrant, whole))
    assert_same(Training(model=model, batches=features(7, 3)), 3, way, uneven=uneven)


@UNEVEN
@pytest.mark.parametrize("use_reentrant", [False, True])
@WAY
def test_the_whole_model_checkpointed_from_outside(way, use_reentrant, uneven):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(checkpointed(model, x.requires_grad_(), use_reentrant), y).backward()
            optimizer.step()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, way, uneven=uneven
    )


class Repeating(nn.Module):
    """One layer in two checkpointed blocks: the reentrant kind brings its gradient in two parts."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 7), nn.Linear(7, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpointed(self.body, x, self.use_reentrant))
        return self.head(x)


@WAY
def test_a_layer_in_two_checkpointed_blocks(way):
    assert_same(Training(model=built(lambda: Repeating(False)), batches=features(7, 3)), 3, way)


class InAndOut(nn.Module):
    """One layer that is called outside of a reentrant block behind the block."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(checkpointed(self.body, x.requires_grad_(), True))
        return self.head(torch.tanh(self.body(x)))


def accumulated(model, loss_fn, optimizer, batches):
    quiet = getattr(optimizer, "accumulate", nullcontext)
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        optimizer.zero_grad()
        with quiet():
            loss_fn(model(first[0]), first[1]).backward()
        loss_fn(model(second[0]), second[1]).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [plain, accumulated])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("make", [lambda: Repeating(True), InAndOut], ids=["twice", "in and out"])
@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "factor"), *CUTS])
def test_gradients_that_come_in_parts(way, make, uneven, loop):
    training = Training(model=built(make), batches=features(7, 3, steps=6), loop=loop)
    assert_same(training, 3, way, uneven=uneven)


def test_factors_go_once_in_a_backward():
    models = [built(lambda: Repeating(True)) for _ in range(2)]
    pins = {"body": "factor", "head": "replicate"}

    def work(comm):
        model = models[comm.rank]
        with using(comm, cluster_of(2)):
            optimizer = sgd(model.parameters())
            sample = features(7, 3)[0]
            shoal.parallelize(model, nn.CrossEntropyLoss(), optimizer, sample=sample, pins=pins)

    with pytest.raises(PlanError, match="several parts of one backward"):
        on_threads(2, work)
