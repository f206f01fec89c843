"""The mark of a round, summed with the gradients: it shows whether ranks differ where they may not.

    in 32 bits and more   1 │ a │ a² │ b │ b²     a, b: the bytes of a word. All ranks have the
                                                  same exactly if n·Σa² = (Σa)²
    in 16 bits            1 │ bit │ bit ···       the word's bits. All ranks have the same if each
                                                  sum is 0 or n

The first sum is n, the number of ranks that were added. So every rank that sees the sums sees
whether any two ranks differ, and all see the same. Only then do they tell one another their values
(engine/common_state.py). This costs these numbers in each bucket, and reading one bucket's sums in
each backward. On a GPU, where reading would wait, no mark is sent. Guarded by
tests/strategies/test_marks.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark

_BITS = 16
_LARGEST = 255  # largest value of a byte


def num_marks(itemsize: int) -> int:
    """Return how many numbers travel with a sum."""
    return 5 if itemsize > 2 else 1 + _BITS


def can_tell(flat: Tensor, ranks: int) -> bool:
    """Return whether a bucket's sums count so many ranks exactly, and may be read."""
    largest = _LARGEST**2 if flat.itemsize > 2 else 1
    return flat.device.type == "cpu" and ranks * largest <= 2 / torch.finfo(flat.dtype).eps


def put(mark: Mark | None, places: Sequence[Tensor]) -> None:
    """Write a round's mark into the places that are summed; `mark` is None if it is not sent."""
    if mark is not None and places:
        told = _numbers(mark.word, len(places[0]))
        for place in places:
            place.copy_(told)


def check(mark: Mark | None, marks: Tensor, comm: Comm) -> None:
    """Raise RanksDiffer if the sums show that ranks differ where they must not."""
    if mark is not None and differ(marks.tolist()):
        mark.compare(comm)


def differ(sums: Sequence[float]) -> bool:
    """Return whether any two ranks have sent different words."""
    ranks, *told = sums
    if len(told) == _BITS:
        return any(bit and bit != ranks for bit in told)
    a, a_squared, b, b_squared = told
    return ranks * a_squared != a * a or ranks * b_squared != b * b


@lru_cache(maxsize=64)
def _numbers(word: int, length: int) -> Tensor:
    """Return a rank's numbers for a word, which mostly is the same as in the step before."""
    if length == 1 + _BITS:
        told = [1.0, *(float(word >> bit & 1) for bit in range(_BITS))]
    else:
        a, b = float(word & _LARGEST), float(word >> 8)
        told = [1.0, a, a * a, b, b * b]
    return torch.tensor(told, device="cpu")
