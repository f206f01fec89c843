"""Optimizers whose steps go by a layer's norm, LARS and LAMB, of pytorch_optimizer.

A part of a tensor has another norm, so owners have whole ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from one_process import Training, assert_same, built, features
from torch import nn

from shoal.core.errors import PlanError

library = pytest.importorskip("pytorch_optimizer")

OPTIMIZERS = {
    "LARS": partial(library.LARS, lr=0.1, weight_decay=0.01),
    "LAMB": partial(library.Lamb, lr=0.05, weight_decay=0.01),
}


def training(make: Callable[..., Any], placement: str = "balanced") -> Training:
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4)]
    return Training(
        model=built(lambda: nn.Sequential(*layers)),
        batches=features(6, 4),
        optimizer=make,
        placement=placement,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("way", "placement"), [("replicate:ring", "balanced"), ("sliced:direct", "round-robin")]
)
def test_ranks_get_what_one_process_gets(name: str, way: str, placement: str) -> None:
    assert_same(training(OPTIMIZERS[name], placement), ranks=3, way=way)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_owners_of_parts_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match='placement="round-robin" gives owners whole parameters'):
        training(OPTIMIZERS[name]).on_ranks(3, "sliced:direct")


def test_one_norm_of_all_gradients_keeps_all_of_them_together() -> None:
    """As LAMB with pre_norm, which clips by it."""
    make = partial(library.Lamb, lr=0.05, pre_norm=True)
    with pytest.raises(PlanError, match="several tensors otherwise than each by itself"):
        training(make, "round-robin").on_ranks(3, "sliced:direct")
