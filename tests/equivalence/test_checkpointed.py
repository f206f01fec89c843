"""Activation checkpointing: forward runs again within backward."""

from __future__ import annotations

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
    features,
    mlp,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import UsageError

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


@pytest.mark.parametrize("way", CUTS)
def test_a_layer_in_two_reentrant_blocks_is_served_where_it_is_cut(way):
    assert_same(Training(model=built(lambda: Repeating(True)), batches=features(7, 3)), 3, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_two_reentrant_blocks_is_refused(way):
    with pytest.raises(UsageError, match="use_reentrant=False"):
        Training(model=built(lambda: Repeating(True)), batches=features(7, 3)).on_ranks(2, way)
