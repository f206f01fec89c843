"""Values that cross a cut, and their gradients, as autograd sees them.

    station s   … values ─▶ [SentOn]  ─▶ a ticket, which this rank's loss depends on
                    network ↓  ↑ gradients
    station s+1           [Arrived] ─▶ values …

Sending is the end of a rank's graph. Its ticket makes backward come there, where the gradients from
the next station are waited for. Autograd takes the youngest node first, so on every rank the last
micro-batch goes through first.

Reference: Huang et al., "GPipe", 2019, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import UsageError


class Gradients(Protocol):
    """One forward of all ranks, in backward."""

    def return_gradients(self, station: int, micro: int, grads: Sequence[Tensor]) -> None:
        """Send gradients of arrived values back to the station before."""

    def take_gradients(self, station: int, micro: int) -> Sequence[Tensor]:
        """Wait for the gradients of the values that were sent to the station behind."""

    def slopes(self, grad: Tensor) -> Sequence[Tensor]:
        """Tell the holder of the end this rank's gradient of its loss; the holder gets all."""


class Arrived(torch.autograd.Function):
    """Values that have come, and a token by which backward is sure to come here."""

    @staticmethod
    def forward(
        ctx: Any, run: Gradients, station: int, micro: int, anchor: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.at = run, (station, micro)
        return (
            torch.zeros((), dtype=torch.float64, device="cpu"),
            *(value.detach() for value in values),
        )

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        run = once(ctx)
        run.return_gradients(*ctx.at, grads)
        return (None,) * (4 + len(grads))


class SentOn(torch.autograd.Function):
    """Values that have gone; a ticket in their place."""

    @staticmethod
    def forward(
        ctx: Any, run: Gradients, station: int, micro: int, token: Tensor | None, *values: Tensor
    ) -> Tensor:
        ctx.run, ctx.at, ctx.has_token = run, (station, micro), token is not None
        return torch.zeros((), dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
        run = once(ctx)
        grads = run.take_gradients(*ctx.at)
        token = torch.zeros((), dtype=torch.float64, device="cpu") if ctx.has_token else None
        return (None, None, None, token, *grads)


class EndLoss(torch.autograd.Function):
    """This rank's loss, and the losses of all ranks where the end of the model is.

    Args:
        result: its place among the results at the end.
        value: the loss of this rank's rows.
        num_losses: the number of losses, which come first in `others`: of every rank's rows where
            the end is, else none.
        num_parts: the number of empty parts of parameters that other ranks hold, which come next.
        others: the losses, the parts, then tickets and tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Gradients,
        result: Any,
        value: Tensor,
        num_losses: int,
        num_parts: int,
        *others: Tensor,
    ) -> Tensor:
        ctx.run, ctx.result, ctx.counts = run, result, (num_losses, num_parts)
        ctx.others = [(other.dtype, other.device, other.shape) for other in others]
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run = once(ctx)
        slopes, ctx.result = run.slopes(grad), None
        num_losses, _ = ctx.counts
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device)
            for dtype, device, shape in ctx.others[num_losses:]
        ]
        return (None, None, None, None, None, *slopes, *zeros)


def once(ctx: Any) -> Any:
    """Return a node's run, for the first backward through it."""
    run, ctx.run = ctx.run, None
    if run is None:
        raise UsageError(
            "a second backward through a forward that went through a pipeline",
            do="call the model again, or add the losses before backward",
        )
    return run
