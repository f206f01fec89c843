"""The mark of a round, summed beside gradients: whether ranks have in common what they must.

    a rank adds    1 │ bit │ bit ···      15 bits of a digest
    the sum has    n │ 0 or n, where all of them have the same bit

So every rank that sees the sum sees whether any two differ, and all see the same. Only then do they
tell one another what they have (engine/common.py). Costs 16 numbers in each bucket, and a look at
those of one bucket a backward. On a GPU, where a look would wait, nothing is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark

NUM_MARKS = 16


def can_tell(flat: Tensor, ranks: int) -> bool:
    """Whether a bucket's sums count the ranks, and may be looked at."""
    return flat.device.type == "cpu" and ranks <= 2 / torch.finfo(flat.dtype).eps


def put(mark: Mark | None, places: Sequence[Tensor]) -> None:
    """Put a round's mark where it is summed, of a transfer that takes it along."""
    if mark is not None:
        for place in places:
            place.copy_(mark.numbers)


def check(mark: Mark | None, marks: Tensor, comm: Comm) -> None:
    """Raise RanksDiffer where the sum shows that ranks differ in what matters."""
    if mark is None:
        return
    counted, *bits = marks.tolist()
    if any(bit and bit != counted for bit in bits):
        mark.compare(comm)
