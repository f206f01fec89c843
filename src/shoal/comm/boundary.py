"""What crosses between ranks within forward and backward: each move an autograd operator with its transpose.

A layer that is cut over P ranks sees the rows of all of them. Rank r brings K_r rows of width W:

    gathered    (K_r, W) on r      ->  (ΣK, W) on every rank          back: the rows' owners add up
    summed      (ΣK, W) on all     ->  (K_r, W), added up, on r       back: gathered
    to_columns  (K_r, W) on r      ->  (ΣK, W_r): its columns         back: to_rows
    to_rows     (ΣK, W_r) on r     ->  (K_r, W)                       back: to_columns
    dealt       some rows to each  ->  some rows from each            back: dealt back

`scale` multiplies what goes back. A parameter's gradient is a mean over ranks, so a cut layer divides by P what comes
back into it and multiplies by P what leaves it again, instead of a pass over its weights. Each costs at most one
message to and from every peer, and the counts of rows (`rows_of_all`) 80 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.contracts import Comm
from shoal.core.errors import UsageError

_Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of every rank in one call of a layer."""

    comm: Comm
    counts: tuple[int, ...]

    def gathered(self, x: Tensor, scale: float) -> Tensor:
        """Every rank's rows, in rank order, on every rank."""
        return _moved(x, self._gather, self._sum, scale)

    def summed(self, x: Tensor, scale: float) -> Tensor:
        """This rank's rows of the sum over ranks, added up in rank order."""
        return _moved(x, self._sum, self._gather, scale)

    def to_columns(self, x: Tensor, widths: Sequence[int], scale: float) -> Tensor:
        """All ranks' rows, of the columns that are this rank's."""
        return _moved(x, lambda t: self._to_columns(t, widths), lambda t: self._to_rows(t, widths), scale)

    def to_rows(self, x: Tensor, widths: Sequence[int], scale: float) -> Tensor:
        """This rank's rows, of all columns."""
        return _moved(x, lambda t: self._to_rows(t, widths), lambda t: self._to_columns(t, widths), scale)

    def _gather(self, x: Tensor) -> Tensor:
        everyone = x.new_empty(sum(self.counts), x.shape[1])
        self.comm.all_to_all(everyone.split(self.counts), [x.contiguous()] * self.comm.size)
        return everyone

    def _sum(self, x: Tensor) -> Tensor:
        mine = self.counts[self.comm.rank]
        parts = x.new_empty(self.comm.size, mine, x.shape[1])
        self.comm.all_to_all(parts.unbind(), x.contiguous().split(self.counts))
        return parts.sum(0)

    def _to_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        everyone = x.new_empty(sum(self.counts), widths[self.comm.rank])
        self.comm.all_to_all(everyone.split(self.counts), [part.contiguous() for part in x.split(list(widths), 1)])
        return everyone

    def _to_rows(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        mine = self.counts[self.comm.rank]
        parts = [x.new_empty(mine, width) for width in widths]
        self.comm.all_to_all(parts, x.contiguous().split(self.counts))
        return torch.cat(parts, 1)


def rows_of_all(comm: Comm, rows: int, what: str) -> Rows:
    """Tell every rank how many rows this one brings, and what for (RanksDiffer if others are about something else)."""
    return Rows(comm, tuple(comm.numbers([rows] * comm.size, what)))


def call_of(layer: str) -> str:
    """What messages name a call of a layer: a rank that evaluates alone must not meet others that train."""
    return f"{'training' if torch.is_grad_enabled() else 'evaluation (no_grad)'}, call of layer {layer}"


def refuse_second_derivative() -> None:
    """Raise UsageError in a backward that is to be differentiated again."""
    if torch.is_grad_enabled():
        raise UsageError(
            "a layer that is cut over the ranks cannot be differentiated twice (create_graph=True)",
            do='pin the layer to "replicate"',
        )


def dealt(x: Tensor, comm: Comm, sent: Sequence[int], received: Sequence[int], scale: float = 1.0) -> Tensor:
    """Deal rows to the ranks, `sent[r]` in a row to rank r, and put together what comes; back it is dealt back."""

    def deal(rows: Tensor, out: Sequence[int], come: Sequence[int]) -> Tensor:
        landed = rows.new_empty(sum(come), *rows.shape[1:])
        comm.all_to_all(landed.split(list(come)), rows.contiguous().split(list(out)))
        return landed

    return _moved(x, lambda rows: deal(rows, sent, received), lambda rows: deal(rows, received, sent), scale)


def _moved(x: Tensor, there: _Move, back: _Move, scale: float) -> Tensor:
    moved: Tensor = _Boundary.apply(x, there, back, scale)  # type: ignore[no-untyped-call]
    return moved


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Move, back: _Move, scale: float) -> Tensor:
        ctx.back, ctx.scale = back, scale
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_derivative()
        back = ctx.back(grad)
        return back if ctx.scale == 1.0 else back.mul_(ctx.scale), None, None, None
