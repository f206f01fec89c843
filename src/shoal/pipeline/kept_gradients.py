"""Gradients of a call that has gone back early, until backward asks for them.

    compute_loss(…)    micro-batches go there and back: gradients of this rank's parameters are kept
    loss.backward()    ranks tell each other the slopes of their losses; [KeptLoss] gives the kept
                       gradients times the slope to autograd, as if they were computed then

So hooks, accumulation and the engine's round see them in backward, as ever. A call goes back once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError

_CLOSE = 1e-5  # slopes of two ranks that differ by less have been rounded
_EXACT = 1e-14  # a factor that is so near to 1 is 1
WAY_OUT = 'leave out schedule="1f1b"'


@final
class KeptGradients:
    """The gradients of this rank's parameters, for the rows of all ranks.

    Args:
        parameters: the trainable parameters that this rank holds.
        slopes: the slope of each rank's loss that they were computed with.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], slopes: Sequence[float]) -> None:
        self.parameters, self._slopes = parameters, slopes
        self._sums: list[Tensor | None] | None = [None] * len(parameters)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add the gradients of a micro-batch."""
        sums = self._sums
        assert sums is not None
        for number, grad in enumerate(grads):
            if grad is None:
                continue
            so_far = sums[number]
            if so_far is None:
                sums[number] = grad.clone()  # autograd may give two parameters one tensor
            elif so_far.layout is torch.strided:
                so_far.add_(grad)
            else:
                sums[number] = so_far + grad

    def check(self) -> None:
        """Raise UsageError if they were taken before."""
        if self._sums is None:
            raise UsageError(
                "a second backward through a forward that has gone back early",
                do=f"call compute_loss again, add the losses before backward, or {WAY_OUT}",
            )

    def take(self, slopes: Sequence[float]) -> list[Tensor | None]:
        """Return the gradients for the slopes of all ranks' losses.

        Raises:
            RanksDiffer: slopes are not the same multiple of the supposed ones on every rank.
        """
        assert self._sums is not None
        pairs = [*zip(slopes, self._slopes, strict=True)]
        factors = [now / then for now, then in pairs if then]
        factor = factors[0] if factors else 1.0
        for rank, (now, then) in enumerate(pairs):
            if abs(now - factor * then) > _CLOSE * abs(factor * then):
                raise RanksDiffer(
                    "ranks scale their losses otherwise, and micro-batches have gone back already",
                    got=f"slopes {[now for now, _ in pairs]}",
                    expected=f"a multiple of {[then for _, then in pairs]}",
                    do=f"scale the loss by the same number on every rank, or {WAY_OUT}",
                    rank=rank,
                )
        sums, self._sums = self._sums, None
        if abs(factor - 1) <= _EXACT:
            return sums
        return [None if grad is None else grad * factor for grad in sums]


class EarlyForward(Protocol):
    """A forward that has gone back early."""

    def release(self, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients of this rank's parameters, given that of its loss (a collective)."""


class KeptLoss(torch.autograd.Function):
    """This rank's loss, of which the gradients are kept.

    Args:
        value: the loss of this rank's rows.
        num_parameters: the number of parameters that this rank holds, which come first in
            `others`; behind them come empty parts of the other ranks' parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, run: EarlyForward, value: Tensor, num_parameters: int, *others: Tensor
    ) -> Tensor:
        ctx.run = run
        ctx.others = [(other.dtype, other.device, other.shape) for other in others[num_parameters:]]
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = ctx.run.release(grad)
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) for dtype, device, shape in ctx.others
        ]
        return (None, None, None, *grads, *zeros)


@contextmanager
def hooks_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Take the hooks off parameters inside: they see gradients once, in the script's backward."""
    all_hooks: list[dict[int, Any]] = [p._backward_hooks for p in parameters if p._backward_hooks]
    before = [dict(hooks) for hooks in all_hooks]
    for hooks in all_hooks:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(all_hooks, before, strict=True):
            hooks.update(own)


def tell_slopes(comm: Comm, own: float) -> list[float]:
    """Return a number of each rank (a collective)."""
    told = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(comm.size)]
    comm.all_gather(told, torch.tensor([own], dtype=torch.float64, device="cpu"))
    return [float(each) for each in told]
