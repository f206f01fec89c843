"""Gradients of a layer served by `factor` that its factors do not hold: from a penalty, or a second
use of the weight.

    1  before autograd adds one to `.grad`   the present `.grad` is laid aside
    2  after autograd has added it           `.grad` is that gradient alone: it is kept here, and
                                             the tensor from step 1 is put back
    3  on the lane                           if the ranks' headers say that any rank has one, they
                                             are summed like a bucket (exchange/direct.py)

So `.grad` holds only the gradient made of factors. In a backward without such gradients, this costs
two calls. Guarded by tests/equivalence/test_elsewhere.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import OwnHook, accumulates
from shoal.exchange.direct import Direct
from shoal.strategies.landing import history


@final
class Elsewhere:
    """Gradients of one layer that its factors do not hold.

    Args:
        targets: its parameters.
        reached: told when a backward has brought all of a parameter's gradients.
        accumulators: autograd's nodes of the parameters, as they are now.
    """

    def __init__(
        self,
        targets: Sequence[nn.Parameter],
        reached: Callable[[nn.Parameter], None],
        accumulators: Callable[[], Sequence[Any]],
    ) -> None:
        self._targets = targets
        self._reached, self._accumulators = reached, accumulators
        self._aside: dict[nn.Parameter, Tensor | None] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._hooks = [target.register_hook(_BeforeAddingHook(self, target)) for target in targets]
        self._hooks += [
            target.register_post_accumulate_grad_hook(_AfterAddingHook(self)) for target in targets
        ]

    def __bool__(self) -> bool:
        return bool(self._kept)

    def coming(self, target: nn.Parameter, grad: Tensor | None) -> None:
        """Lay `.grad` aside before autograd adds to it; `grad` is None if factors hold it all."""
        if not accumulates(self._accumulators()):
            return
        if grad is None:
            self._reached(target)
            return
        if grad.requires_grad:
            raise history()
        self._aside[target] = target.grad
        target.grad = None

    def on_landing(self, target: nn.Parameter) -> None:
        """Keep the gradient that autograd has just put into `.grad`, and put the old one back."""
        if target not in self._aside:
            return
        gradient, target.grad = target.grad, self._aside.pop(target)
        assert gradient is not None
        before = self._kept.get(target)
        self._kept[target] = gradient if before is None else before + gradient
        self._reached(target)

    def drop(self) -> None:
        """Forget the kept gradients, because `.grad` was cleared."""
        self._kept.clear()

    def taken(self, targets: Sequence[nn.Parameter], factor: float) -> Tensor | None:
        """Return this rank's kept gradients, flat and multiplied, and forget them; None if none."""
        if not self._kept:
            return None
        flat = torch.cat(
            [self._kept.get(target, torch.zeros_like(target)).reshape(-1) for target in targets]
        )
        self._kept.clear()
        return flat.mul_(factor)

    def release(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def summed(
    mine: Tensor | None, targets: Sequence[nn.Parameter], comm: Comm
) -> Mapping[nn.Parameter, Tensor]:
    """Return the sum over ranks of their gradients, by parameter; `mine` is None if none here."""
    numels = [target.numel() for target in targets]
    like = targets[0]
    flat = mine if mine is not None else like.new_zeros(sum(numels), requires_grad=False)
    exchange = Direct()
    exchange.reduce(flat, comm)
    exchange.gather(flat, comm)
    pieces = flat.split(numels)
    return {target: piece.view(target.shape) for target, piece in zip(targets, pieces, strict=True)}


@final
@dataclass(frozen=True)
class _BeforeAddingHook(OwnHook):
    """A hook that autograd calls before it adds a gradient to `.grad`."""

    elsewhere: Elsewhere
    target: nn.Parameter

    def __call__(self, grad: Tensor | None) -> None:
        self.elsewhere.coming(self.target, grad)


@final
@dataclass(frozen=True)
class _AfterAddingHook(OwnHook):
    """A hook that autograd calls when it has added a gradient to `.grad`."""

    elsewhere: Elsewhere

    def __call__(self, target: nn.Parameter) -> None:
        self.elsewhere.on_landing(target)
