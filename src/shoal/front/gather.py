"""Rows of all ranks on every rank, and the way back for their gradients: `shoal.gather`.

    forward    (K_r, …) on rank r      ->  (ΣK, …) on every rank, in the order of the ranks
    backward   (ΣK, …) on every rank   ->  (K_r, …) on rank r, added up over the ranks

Each rank's loss depends on the rows of all ranks, so a row's gradient is the sum over the losses of
all ranks. Nothing is scaled: if every rank counts alike (`weigh="ranks"`), the mean over ranks that
follows is that of all losses. Each way a rank sends its rows to every other rank, and the thread
that calls waits for the rows of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.contracts.comm import Comm

FORWARD, BACKWARD = "shoal.gather()", "backward, shoal.gather()"


@final
@dataclass(frozen=True)
class RowsOfRanks:
    """Rows of one form, of which each rank has some.

    Args:
        comm: the ranks.
        counts: number of rows of each rank.
        at_host: whether they cross by way of the host, because ranks have unlike devices.
    """

    comm: Comm
    counts: tuple[int, ...]
    at_host: bool = False

    def gathered(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks (a collective)."""
        device, own = own.device, self._place(own)
        rows = own.new_empty(sum(self.counts), *own.shape[1:])
        self._exchange(rows.split(self.counts), [own] * self.comm.size, FORWARD)
        return rows.to(device)

    def summed(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks, in the order of ranks (a collective)."""
        device, rows = rows.device, self._place(rows)
        parts = rows.split(self.counts)
        coming = [torch.empty_like(parts[self.comm.rank]) for _ in self.counts]
        self._exchange(coming, parts, BACKWARD)
        first, *others = coming
        for other in others:
            first += other
        return first.to(device)

    def _place(self, rows: Tensor) -> Tensor:
        rows = rows.detach().resolve_conj().resolve_neg().contiguous()
        return rows.cpu() if self.at_host else rows

    def _exchange(self, coming: Sequence[Tensor], going: Sequence[Tensor], purpose: str) -> None:
        self.comm.journal.begins(purpose)
        # bytes, because networks do not know every type
        self.comm.all_to_all(
            *([part.view(-1).view(torch.uint8) for part in parts] for parts in (coming, going))
        )

    def with_history(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, from which gradients find back (a collective)."""
        # send the others' gradients also if this rank's rows need none
        anchor = torch.zeros((), requires_grad=True, device=own.device)
        rows: Tensor = _GatheredRows.apply(own, anchor, self)  # type: ignore[no-untyped-call]
        return rows


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, ranks: RowsOfRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gathered(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        own = ctx.ranks.summed(grad)
        return own if ctx.needs_input_grad[0] else None, None, None
