"""Values in blocks that each have a scale of their own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Values as rows of a block each, with zeros behind the last; a view where none are needed."""
    short = -len(values) % block
    return (pad(values, (0, short)) if short else values).view(-1, block)


def largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row, a column; NaN where there is one.

    Two reductions without a copy take less than the absolute values' one.
    """
    return torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())
