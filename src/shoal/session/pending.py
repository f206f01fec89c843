"""A model that is parallelised by its first batch: its record until then.

Until then it is an ordinary model, so its optimizers may not step: every rank would train by
itself. The record hangs on the model. A copy or a pickle takes none of it along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
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

    def end(self) -> None:
        """Let the optimizers step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


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
        do="compute the loss by the function that parallelize returned. If the step has a "
        "closure, give parallelize a sample",
    )
