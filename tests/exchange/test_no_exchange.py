"""Nothing: each rank keeps what it has."""

from __future__ import annotations

import torch
from performed import contribution, perform, same_bits

from shoal.exchange.no_exchange import Nothing


def test_nothing_leaves_each_rank_its_own() -> None:
    assert not Nothing().exact
    for rank, outcome in enumerate(perform(Nothing(), 3, 1000)):
        assert same_bits(outcome.after_gather, contribution(rank, 1000, torch.float64))
