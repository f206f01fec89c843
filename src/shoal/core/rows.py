"""Rows of a table as a sparse tensor, and the memory of such a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_rows(ids: Tensor, rows: Tensor, shape: Sequence[int], *, coalesced: bool = False) -> Tensor:
    """Make a table that is zero except in these rows. It shares the values of `rows`, uncopied.

    Args:
        ids: numbers of the rows, int64.
        rows: one row for each id.
        shape: the table's shape.
        coalesced: whether the ids ascend, each once.
    """
    table: Tensor = torch.sparse_coo_tensor(
        ids.unsqueeze(0), rows, list(shape), check_invariants=False, is_coalesced=coalesced or None
    )
    return table


def strided_in(tensor: Tensor) -> list[Tensor]:
    """Return the tensors in memory: the tensor itself, or the ids and rows of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, or of the ids and rows of a sparse one."""
    return sum(part.nbytes for part in strided_in(tensor))
