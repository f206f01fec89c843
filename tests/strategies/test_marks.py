"""Sums of marks: every rank sees in them whether any two ranks have told unlike words."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark
from shoal.strategies.marks import can_tell, differ, num_marks, put

pytestmark = pytest.mark.quick
WORDS = [0, 1, 255, 256, 257, 0x0FF0, 0xFFFF]


class Told(Mark):
    def __init__(self, word: int) -> None:
        self.word = word

    def compare(self, comm: Comm) -> None:
        raise AssertionError


def summed(words: list[int], dtype: torch.dtype) -> list[float]:
    total = torch.zeros(num_marks(dtype.itemsize), dtype=dtype)
    for word in words:
        own = torch.empty_like(total)
        put(Told(word), [own])
        total += own
    return list(total.tolist())


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_sum_tells_whether_all_are_the_same(ranks: int, dtype: torch.dtype) -> None:
    for words in product(WORDS, repeat=2):
        told = [words[0]] * (ranks - 1) + [words[1]]
        assert differ(summed(told, dtype)) == (words[0] != words[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_as_many_ranks_as_a_type_counts_it_is_exact(dtype: torch.dtype) -> None:
    most = next(
        ranks for ranks in range(256, 0, -1) if can_tell(torch.zeros(1, dtype=dtype), ranks)
    )
    assert most == 256
    for word in WORDS:
        assert not differ(summed([word] * most, dtype))
        assert differ(summed([word] * (most - 1) + [word ^ 0x0101], dtype))
    assert not can_tell(torch.zeros(1, dtype=dtype), 5000) or dtype == torch.float64


def test_where_nothing_is_summed_nothing_differs() -> None:
    assert not differ(summed([0x1234], torch.float32))
    assert not differ([0.0] * 5)
