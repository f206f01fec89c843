"""An order depends on a seed and the epoch alone, whatever else draws random numbers meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.data.order import Order

SAMPLERS: dict[str, Callable[[], Iterable[object]]] = {
    "random": lambda: RandomSampler(range(50)),
    "with replacement": lambda: RandomSampler(range(50), replacement=True),
    "subset": lambda: SubsetRandomSampler(range(50)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 50, 50),
    "in batches": lambda: BatchSampler(RandomSampler(range(50)), 4, drop_last=False),
}


def drawn(sampler: Iterable[object], seed: int, epoch: int) -> list[object]:
    return list(Order(sampler, seed, epoch).units())


@pytest.mark.quick
@pytest.mark.parametrize("kind", SAMPLERS)
def test_another_thread_that_draws_from_torch_changes_no_order(kind: str) -> None:
    quiet = drawn(SAMPLERS[kind](), 7, 0)
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            torch.rand(1)

    other = threading.Thread(target=draw)
    other.start()
    try:
        assert all(drawn(SAMPLERS[kind](), 7, 0) == quiet for _ in range(40))
    finally:
        ended.set()
        other.join()
    assert drawn(SAMPLERS[kind](), 7, 1) != quiet
