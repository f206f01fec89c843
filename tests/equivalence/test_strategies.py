"""Every strategy with every exact exchange, on 1 to 4 ranks: parameters after five steps against
one process.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from one_process import (
    ALL_CUTS,
    BUCKETED,
    EXACT,
    OTHERS,
    State,
    Training,
    adamw,
    assert_same,
    built,
    difference,
    integers,
    plain,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.contracts.strategy import Strategy
from shoal.core.registry import named
from shoal.strategies.carrier_terms import carriers

WAYS = [
    *(
        f"{strategy}:{exchange}"
        for strategy in BUCKETED
        for exchange in carriers(named(Strategy, strategy))
    ),
    *(f"{strategy}:{exchange}" for strategy in OTHERS for exchange in EXACT),
    *ALL_CUTS,
]
SLICED = [way for way in WAYS if way.startswith("sliced")]
WAYS += [f"{way}, low" for way in SLICED]


# No exchange carries what a rank starts from: the quick set has each strategy once, and low memory.
FIRST = {(way.partition(":")[0], way.endswith("low")): way for way in reversed(WAYS)}.values()
STARTS = [way if way in FIRST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


def test_every_exchange_is_tried_with_every_strategy_that_takes_it() -> None:
    assert {f"{strategy}:hierarchical" for strategy in ("replicate", "sliced", "factor")} <= set(
        WAYS
    )
    assert {f"replicate:{exchange}" for exchange in EXACT} <= set(WAYS)


class Odd(nn.Module):
    """Tokens to classes through one layer of every kind that matters, all sizes odd, some without a
    bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7, padding_idx=0)
        self.mix = nn.Conv1d(7, 5, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 9, bias=False)
        self.scale = nn.Parameter(torch.ones(9))
        self.widen, self.narrow = nn.Linear(9, 11), nn.Linear(11, 9, bias=False)
        self.head = nn.Linear(9, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.mix(self.embed(ids).transpose(1, 2)), inplace=True).transpose(1, 2)
        h = torch.tanh(self.hidden(self.norm(h)))
        h = h + self.narrow(F.gelu(self.widen(h)))
        return self.head(h.mean(1) * self.scale)


BATCHES = [(integers(13, 12, 5, seed=s), integers(5, 12, seed=s + 9)) for s in range(5)]


def training(dtype: torch.dtype, optimizer: Any, loop: Any = plain) -> Training:
    return Training(model=built(Odd, dtype), batches=BATCHES, optimizer=optimizer, loop=loop)


@functools.cache
def alone(dtype: torch.dtype, optimizer: Any, parts: int = 1) -> State:
    """What one process gets that cuts its batches into so many parts."""

    def loop(model, loss_fn, optimizer, batches):
        for batch in batches:
            optimizer.zero_grad()
            for part in range(parts):
                x, y = rows_of(batch, part, parts)
                (loss_fn(model(x), y) * len(y) / len(batch[1])).backward()
            optimizer.step()

    return training(dtype, optimizer, plain if parts == 1 else loop).alone()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process_in_float64(ranks, way, optimizer):
    whole = alone(torch.float64, optimizer)
    assert_same(training(torch.float64, optimizer), ranks, way, expected=whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_one_process_in_float32_with_sgd(ranks, way):
    assert_same(
        training(torch.float32, sgd), ranks, way, expected=alone(torch.float32, sgd), within=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [3, 4])
def test_strays_in_float32_with_adamw_no_further_than_another_cut_of_the_batch(ranks, way):
    whole = alone(torch.float32, adamw)
    spread = max(difference(whole, alone(torch.float32, adamw, parts)) for parts in (2, 3, 4, 6))
    assert 0 < spread < 1e-3
    assert_same(training(torch.float32, adamw), ranks, way, expected=whole, within=3 * spread)


@pytest.mark.parametrize("way", STARTS)
def test_every_rank_starts_from_the_parameters_and_buffers_of_rank_0(way):
    def spoiling(parameters):
        parameters = list(parameters)
        for parameter in parameters if shoal.world().rank else []:
            parameter.data.add_(1.0)
        return sgd(parameters)

    assert_same(Training(model=built(Odd), batches=BATCHES, optimizer=spoiling), 3, way)


@pytest.mark.parametrize("way", SLICED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_low_memory_gives_the_bits_of_fast(ranks, way):
    fast, low = (
        training(torch.float32, adamw).on_ranks(ranks, each)[0] for each in (way, f"{way}, low")
    )
    assert all(torch.equal(fast[name], low[name]) for name in fast)
