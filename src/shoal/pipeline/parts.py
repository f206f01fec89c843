"""Parts of ranks' rows: the micro-batches that go through the stations, one rank's after another's.

    rank 0   rows 0, 1, 2   ─▶ 0: rows 0, 1    1: row 2
    rank 1   rows 0, 1      ─▶ 2: row 0        3: row 1
    rank 2   none           ─▶ 4: no rows

Only tensors that have the rows as their first dimension are cut. Calls of another form than the
sample's go in one part, because nobody has tried them in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.pieces import cut_sizes
from shoal.pipeline.calls import ModelCall, Shape


@dataclass(frozen=True)
class RowPart:
    """Rows of one rank that go through the stations together.

    Args:
        rank: the rank that brings them.
        begin: the number of the first row.
        size: the number of rows.
        cut: whether each tensor of the call is cut; empty if the part is all of a rank's rows.
    """

    rank: int
    begin: int
    size: int
    cut: tuple[bool, ...] = ()

    def shape(self, number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor, by the tensor's number in the call."""
        return (self.size, *shape[1:]) if self.cut and self.cut[number] else shape

    def of(self, number: int, tensor: Tensor) -> Tensor:
        """Return this part of a tensor, by the tensor's number in the call."""
        if not (self.cut and self.cut[number]):
            return tensor
        return tensor.narrow(0, self.begin, self.size)


@dataclass(frozen=True)
class RowParts:
    """The division of each rank's rows into parts.

    Args:
        count: parts of a rank's rows, at most.
        calls: whether each tensor of a call has the rows first, by the form of the call.
        goes_back_early: whether micro-batches go back before all have come (schedule.py).
    """

    count: int = 1
    calls: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    goes_back_early: bool = False

    def of_ranks(self, call: ModelCall, shapes: Sequence[Sequence[Shape]]) -> list[RowPart]:
        """Return the parts of all ranks' rows, in the order of their ranks.

        Args:
            call: a call of the model.
            shapes: the forms of each rank's tensors.
        """
        cut = tuple(self.calls.get(call.form, ())) if self.count > 1 else ()
        counts = [rows_of(own) for own in shapes]
        if not any(cut) or not all(
            _agrees(own, cut, rows) for own, rows in zip(shapes, counts, strict=True)
        ):
            return [RowPart(rank, 0, rows) for rank, rows in enumerate(counts)]
        parts: list[RowPart] = []
        for rank, rows in enumerate(counts):
            begin = 0
            for size in cut_sizes(rows, max(1, min(self.count, rows))):
                parts.append(RowPart(rank, begin, size, cut if size < rows else ()))
                begin += size
        return parts


def rows_of(shapes: Sequence[Shape]) -> int:
    """Return the number of rows: the first dimension of the first tensor that has dimensions."""
    return next((shape[0] for shape, _ in shapes if shape), 1)


def _agrees(shapes: Sequence[Shape], cut: Sequence[bool], rows: int) -> bool:
    """Return whether all tensors that are to be cut have so many rows."""
    firsts = [shape[:1] for (shape, _), is_cut in zip(shapes, cut, strict=True) if is_cut]
    return all(first == (rows,) for first in firsts)


def joined(outputs: Sequence[Any]) -> Any:
    """Return one rank's output, given its parts' outputs in order."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    leaves = [
        torch.cat(list(parts)) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])
