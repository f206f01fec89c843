"""Gradients of a layer served by factors that its factors do not hold: a penalty, a use elsewhere.

    1  before autograd adds one to `.grad`   what is there is laid aside
    2  behind                                `.grad` has that gradient alone: it is kept here, and
                                             what was laid aside is put back
    3  on the lane                           where the ranks' headers say that any has one, they are
                                             summed like a bucket (exchange/direct.py)

So `.grad` stays what the factors make of it. Costs nothing but two calls a backward where there are
none. Guarded by tests/equivalence/test_elsewhere.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.weighing import OwnHook, accumulates
from shoal.exchange.direct import Direct
from shoal.strategies.landing import history


@final
class Elsewhere:
    """Those of one layer.

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
        """Autograd has all of a parameter's gradients; None where all are in factors."""
        if not accumulates(self._accumulators()):
            return
        if grad is None:
            self._reached(target)
            return
        if grad.requires_grad:
            raise history()
        self._aside[target] = target.grad
        target.grad = None

    def landed(self, target: nn.Parameter) -> None:
        """It has put one from elsewhere into `.grad`."""
        if target not in self._aside:
            return
        gradient, target.grad = target.grad, self._aside.pop(target)
        assert gradient is not None
        before = self._kept.get(target)
        self._kept[target] = gradient if before is None else before + gradient
        self._reached(target)

    def drop(self) -> None:
        """Forget what is kept: `.grad` was cleared."""
        self._kept.clear()

    def taken(self, targets: Sequence[nn.Parameter], factor: float) -> Tensor | None:
        """What this rank has, flat and multiplied, for an exchange; None for nothing."""
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
    """The sum over ranks of what each has, by parameter."""
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
        self.elsewhere.landed(target)
