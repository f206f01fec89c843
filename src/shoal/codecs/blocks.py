"""Values in blocks that each have a scale of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.core.errors import UsageError
from shoal.core.numbers import check_whole

_MOST_BLOCK = 1 << 16


def check_block(rule: str, block: Any, multiple: int, *, do: str) -> None:
    """Raise UsageError, with that rule, unless a block has a whole multiple of so many values."""
    check_whole(rule, block, multiple, _MOST_BLOCK, do=do)
    if block % multiple:
        raise UsageError(rule, got=str(block), do=do)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Values as rows of a block each, with zeros behind the last; a view where none are needed."""
    short = -len(values) % block
    return (pad(values, (0, short)) if short else values).view(-1, block)


def largest(rows: Tensor) -> Tensor:
    """The largest absolute value of each row, a column; NaN where there is one.

    Two reductions without a copy take less than the absolute values' one.
    """
    return torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())
