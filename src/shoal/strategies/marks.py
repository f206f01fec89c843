"""The mark of a round, summed beside gradients: whether ranks have in common what they must.

    of 32 bits and more   1 │ a │ a² │ b │ b²     the bytes of a word. All ranks have the same
                                                  where n·Σa² = (Σa)², and nowhere else
    of 16 bits            1 │ bit │ bit ···       its bits. All have the same where each sum is 0
                                                  or n

The first sum is n, the ranks that were added. So every rank that sees the sums sees whether any two
differ, and all see the same. Only then do they tell one another what they have (engine/common.py).
Costs these numbers in each bucket, and a look at those of one bucket a backward. On a GPU, where a
look would wait, nothing is told. Guarded by tests/strategies/test_marks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark

_BITS = 16
_LARGEST = 255  # of a byte


def num_marks(itemsize: int) -> int:
    """Numbers that go with a sum."""
    return 5 if itemsize > 2 else 1 + _BITS


def can_tell(flat: Tensor, ranks: int) -> bool:
    """Whether a bucket's sums hold those of so many ranks exactly, and may be looked at."""
    largest = _LARGEST**2 if flat.itemsize > 2 else 1
    return flat.device.type == "cpu" and ranks * largest <= 2 / torch.finfo(flat.dtype).eps


def put(mark: Mark | None, places: Sequence[Tensor]) -> None:
    """Put a round's mark where it is summed, of a transfer that takes it along."""
    if mark is not None and places:
        told = _numbers(mark.word, len(places[0]))
        for place in places:
            place.copy_(told)


def check(mark: Mark | None, marks: Tensor, comm: Comm) -> None:
    """Raise RanksDiffer where the sum shows that ranks differ in what matters."""
    if mark is not None and differ(marks.tolist()):
        mark.compare(comm)


def differ(sums: Sequence[float]) -> bool:
    """Whether not all ranks have told the same."""
    ranks, *told = sums
    if len(told) == _BITS:
        return any(bit and bit != ranks for bit in told)
    a, a_squared, b, b_squared = told
    return ranks * a_squared != a * a or ranks * b_squared != b * b


@lru_cache(maxsize=64)
def _numbers(word: int, length: int) -> Tensor:
    """What a rank tells: mostly the same as in the step before."""
    if length == 1 + _BITS:
        told = [1.0, *(float(word >> bit & 1) for bit in range(_BITS))]
    else:
        a, b = float(word & _LARGEST), float(word >> 8)
        told = [1.0, a, a * a, b, b * b]
    return torch.tensor(told, device="cpu")
