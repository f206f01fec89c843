"""Rows of a table as a sparse tensor, and what such a one holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_rows(ids: Tensor, rows: Tensor, shape: Sequence[int], *, coalesced: bool = False) -> Tensor:
    """A table of zeros but for these rows; the values are those of `rows`, not copied.

    Args:
        ids: which rows, int64.
        rows: one for each id.
        shape: of the table.
        coalesced: the ids ascend, each once.
    """
    table: Tensor = torch.sparse_coo_tensor(
        ids.unsqueeze(0), rows, list(shape), check_invariants=False, is_coalesced=coalesced or None
    )
    return table


def strided_in(tensor: Tensor) -> list[Tensor]:
    """What lies in memory of a tensor: itself, or the ids and rows of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def held_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, or of the ids and rows of a sparse one."""
    return sum(part.nbytes for part in strided_in(tensor))
