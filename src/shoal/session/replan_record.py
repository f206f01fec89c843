"""Record of `parallelize(…, replan=True)` on a model, so that its plan can be made anew.

It hangs on the model, because the loss may lead to the model. So it ends with the model. A copy or
a pickle leaves it behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from torch import nn

from shoal.strategies.copies import StaysBehind, leaves_behind

_SLOT = "_shoal_again"
Asked = TypeVar("Asked")


@final
class Again(StaysBehind, Generic[Asked]):
    """Arguments of `parallelize`, and a fact that the sample showed.

    Args:
        loss_fn: the loss as it was given.
        asked: the request.
        alike: whether ranks get the same inputs on purpose.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, asked: Asked, alike: bool) -> None:
        self.loss_fn, self.asked, self.alike = loss_fn, asked, alike


def keep(model: nn.Module, again: Again[Any]) -> None:
    """Hang the record on a model."""
    leaves_behind(type(model))
    model.__dict__[_SLOT] = again


def kept(model: nn.Module) -> Again[Any] | None:
    """Return the record of a model, if it has one."""
    again: Again[Any] | None = model.__dict__.get(_SLOT)
    return again


def forget(model: nn.Module) -> None:
    """Take the record off a model."""
    model.__dict__.pop(_SLOT, None)
