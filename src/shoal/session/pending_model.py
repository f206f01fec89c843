"""A model that is parallelised by its first batch: its record until then.

Until then it is an ordinary model, so its optimizers may not step: every rank would train by
itself. A step with a closure may come first: the closure has the first batch. The record hangs on
the model. A copy or a pickle leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.optim.closure_loss import steers_by_loss
from shoal.optim.methods import Methods
from shoal.strategies.copies import StaysBehind, leaves_behind

_SLOT = "_shoal_pending"


@final
class PendingPlan(StaysBehind):
    """The record of a model without a plan yet.

    Args:
        optimizers: the optimizers of the model.

    Attributes:
        loaded: features' states by their names, as a checkpoint was loaded before the first batch.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.loaded: Mapping[str, Any] = {}
        self._hooks = [each.register_step_pre_hook(_refuse) for each in optimizers]
        self._methods = [Methods(each) for each in optimizers]
        for optimizer, methods in zip(optimizers, self._methods, strict=True):
            methods.replace("step", partial(self._step, optimizer))

    def end(self) -> None:
        """Let the optimizers step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for methods in self._methods:
            methods.restore()
        self._methods.clear()

    def _step(
        self, optimizer: Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step. A first step calls its closure before, because the plan follows from it."""
        closure = args[0] if args else kwargs.get("closure")
        if not self._hooks or closure is None or steers_by_loss(optimizer):
            return original(*args, **kwargs)
        with torch.enable_grad():
            loss = closure()
        optimizer.step()  # the optimizer knows its parts now
        return loss


def wait_for_batch(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Hang a record on a model."""
    leaves_behind(type(model))
    model.__dict__[_SLOT] = PendingPlan(optimizers)


def pending_of(model: nn.Module) -> PendingPlan | None:
    """Return the record of a model, if it has no plan yet."""
    pending: PendingPlan | None = model.__dict__.get(_SLOT)
    return pending


def end_waiting(model: nn.Module) -> None:
    """Take the record off a model, if it has one."""
    if (pending := model.__dict__.pop(_SLOT, None)) is not None:
        pending.end()


def _refuse(*_: object) -> None:
    raise UsageError(
        "an optimizer steps before the first batch, so its model has no plan yet",
        do="compute the loss by the function that parallelize returned. For LBFGS give "
        "parallelize a sample",
    )
