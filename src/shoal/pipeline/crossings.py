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
from functools import partial
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

    def slopes(self, result: Any, grad: Tensor, forms: Sequence[Any]) -> Sequence[Tensor]:
        """Tell the holder of the end this rank's gradient of a result; the holder gets all.

        They are of these types, devices and shapes.
        """

    def go_back(self) -> None:
        """Tell hosts without rows that a backward goes through this forward."""


class Arrived(torch.autograd.Function):
    """Values that have come, and a token by which backward is sure to come here."""

    @staticmethod
    def forward(
        ctx: Any, run: Gradients, station: int, micro: int, anchor: Tensor, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.at = run, (station, micro)
        ctx.save_for_backward(anchor)
        return (
            torch.zeros((), dtype=torch.float64, device="cpu"),
            *(value.detach() for value in values),
        )

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        run = run_of(ctx)
        run.return_gradients(*ctx.at, grads)
        return (None,) * (4 + len(grads))


class SentOn(torch.autograd.Function):
    """Values that have gone; a ticket in their place."""

    @staticmethod
    def forward(
        ctx: Any, run: Gradients, station: int, micro: int, token: Tensor | None, *values: Tensor
    ) -> Tensor:
        ctx.run, ctx.at, ctx.has_token = run, (station, micro), token is not None
        ticket = torch.zeros((), dtype=torch.float64, device="cpu")
        ctx.save_for_backward(ticket)
        return ticket

    @staticmethod
    def backward(ctx: Any, ticket: Tensor) -> tuple[Any, ...]:
        run = run_of(ctx)
        grads = run.take_gradients(*ctx.at)
        token = torch.zeros((), dtype=torch.float64, device="cpu") if ctx.has_token else None
        return (None, None, None, token, *grads)


class BackwardGate(torch.autograd.Function):
    """A gate between a call's losses and its values: backward comes here behind all losses.

    The parts are those of parameters that hosts without rows hold. No gradient goes to them.
    """

    @staticmethod
    def forward(ctx: Any, run: Gradients, num_parts: int, *others: Tensor) -> Tensor:
        ctx.run, ctx.result, ctx.num_parts = run, None, num_parts
        ctx.others = [(other.dtype, other.device) for other in others[1 + num_parts :]]
        ctx.save_for_backward(others[0])
        return torch.zeros((), dtype=torch.float64, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run_of(ctx).go_back()
        zeros = [torch.zeros((), dtype=dtype, device=device) for dtype, device in ctx.others]
        return (None, None, None, *[None] * ctx.num_parts, *zeros)


class EndLoss(torch.autograd.Function):
    """This rank's loss, and the losses of all ranks where the end of the model is.

    It may be any tensor: an output that a rank has looked at takes its gradient so, too.

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
        ctx.save_for_backward(others[-1])
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        run = run_of(ctx)
        num_losses, _ = ctx.counts
        slopes = run.slopes(ctx.result, grad, ctx.others[:num_losses])
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device)
            for dtype, device, shape in ctx.others[num_losses:]
        ]
        return (None, None, None, None, None, *slopes, *zeros)


def run_of(ctx: Any) -> Any:
    """Return a node's run, for a backward through it.

    Behind the backward the node forgets it, unless the graph is kept (`retain_graph`).
    """
    if ctx.run is None:
        raise UsageError(
            "a second backward through a forward that went through a pipeline",
            do="give the first one retain_graph=True, or add the losses before backward",
        )
    torch.autograd.Variable._execution_engine.queue_callback(partial(_forget, ctx))
    return ctx.run


def _forget(ctx: Any) -> None:
    """Forget a node's run, if autograd has forgotten what it saved."""
    try:
        ctx.saved_tensors  # noqa: B018
    except RuntimeError:
        ctx.run = ctx.result = None
