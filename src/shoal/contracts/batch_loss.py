"""A `compute_loss` with further arguments, as one function of a model and a batch.

    packed        all arguments after the model are the batch, a tuple: compute_loss(model, x, y)
    beside        the first one is the batch. The others have no rows, e.g. a number of tokens

Guarded by tests/equivalence/test_first_batch.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree


@final
@dataclass(frozen=True)
class BatchLoss:
    """Function of (model, batch) that computes the loss by calling a function of more arguments.

    Args:
        function: the function as it was given.
        packed: whether the batch is the tuple of all arguments after the model.
        beside: further arguments for a measured step.
        named: further keyword arguments for it.
    """

    function: Callable[..., Any]
    packed: bool = False
    beside: Sequence[Any] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Compute the loss of a batch."""
        if self.packed:
            return self.function(model, *batch, **self.named)
        return self.function(model, batch, *self.beside, **self.named)

    def of(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[BatchLoss, Any]:
        """Return the function for a first call, and the batch of this call.

        If further arguments have rows, as in compute_loss(model, x, y), all of them are the batch.
        """
        batch, named = self.in_order(batch, named)
        if any(map(_has_rows, batch[1:])):
            return replace(self, packed=True, named=named), batch
        return replace(self, beside=batch[1:], named=named), batch[0]

    def in_order(
        self, batch: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all positional arguments after the model in their order, and the keyword-only
        arguments.
        """
        if not named:
            return batch, {}
        bound = inspect.signature(self.function).bind(None, *batch, **named)
        return bound.args[1:], bound.kwargs

    def count(self, count: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return a count of a batch. If it is packed, the count is given the same arguments."""
        if count is None or not self.packed:
            return count
        return lambda batch: count(*batch)


def given_loss(
    compute_loss: Callable[..., Any] | None, loss_fn: Callable[..., Any] | None = None
) -> Callable[..., Any] | None:
    """Return the compute_loss that the user gave, or the loss_fn if there is none. Losses are
    compared with None, because a module's truth value may be undefined.
    """
    given = compute_loss.function if isinstance(compute_loss, BatchLoss) else compute_loss
    return loss_fn if given is None else given


def takes(compute_loss: Callable[..., Any], number: int) -> bool:
    """Return whether a function takes so many arguments in order."""
    try:
        inspect.signature(compute_loss).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:  # a function in C has no signature to see
        return True
    return True


def fewest_arguments(compute_loss: Callable[..., Any]) -> int:
    """Return how many arguments in order a function takes at least: 2 for (model, batch)."""
    return next((number for number in range(2, 17) if takes(compute_loss, number)), 0)


def _has_rows(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dim() for leaf in pytree.tree_leaves(value))
