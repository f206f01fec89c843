"""Values in blocks that each have a scale of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.ranges import LEAST, MOST, within
from shoal.core.errors import UsageError
from shoal.core.numbers import check_whole

_MOST_BLOCK = 1 << 16
_MOST = MOST * (1 - 1e-6)  # the sum of all steps stays below MOST, however it is rounded


def check_block(rule: str, block: Any, multiple: int, *, do: str) -> None:
    """Raise UsageError, with that rule, unless a block has a whole multiple of so many values."""
    check_whole(rule, block, multiple, _MOST_BLOCK, do=do)
    if block % multiple:
        raise UsageError(rule, got=str(block), do=do)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Return values as rows, a block each, with zeros at the end; a view if none are needed."""
    short = -len(values) % block
    return (pad(values, (0, short)) if short else values).view(-1, block)


def largest(rows: Tensor) -> Tensor:
    """Return the largest absolute value of each row, as a column; NaN if a row has one.

    Two reductions without a copy are faster than a reduction of absolute values.
    """
    return torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())


def scales(rows: Tensor, steps: int) -> Tensor:
    """Return the size of a step in each row, as a column, if its largest value is so many steps.

    Float32 can hold the size, although rows may have float64.
    """
    sizes = largest(rows)
    if sizes.dtype == torch.float64:
        sizes = within(sizes, _MOST)
    return sizes.mul_(1 / steps).clamp_(min=LEAST)


def in_steps(rows: Tensor, scale: Tensor, steps: int) -> Tensor:
    """Return how many steps each value is, a whole number. `scale` is not needed afterwards."""
    exact = rows * scale.reciprocal_()
    if exact.dtype == torch.float64:  # values may exceed float32's range
        exact.clamp_(-steps, steps)
    return exact.round_()
