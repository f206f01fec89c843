"""Optimizers that steer by a closure's loss (LBFGS): every rank gives them the mean of all ranks.

A rank's own loss differs, so ranks would search along lines of their own. The cost is two numbers
from each rank for each call of the closure. Guarded by tests/equivalence/test_lbfgs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.profiling.identity import trainable_layers

_LABEL = "the loss of a closure"


def steers_by_loss(optimizer: Optimizer) -> bool:
    """Return whether steps depend on the number that a closure returns."""
    return isinstance(optimizer, LBFGS)


def check_updated_everywhere(optimizers: Sequence[Optimizer], model: nn.Module, plan: Plan) -> None:
    """Refuse a plan by which a rank has only some of the gradients that such an optimizer needs.

    Raises:
        PlanError: the plan gives a layer of LBFGS to owners, or to one rank, or cuts it.
    """
    layers = {layer.name: layer.parameters.values() for layer in trainable_layers(model)}
    for optimizer in filter(steers_by_loss, optimizers):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for choice in plan.choices:
            role = named(Strategy, choice.strategy).role
            own = map(id, layers.get(choice.layer, ()))
            if not role.is_updated_everywhere and not held.isdisjoint(own):
                name = type(optimizer).__name__
                raise PlanError(
                    f"{choice.strategy} cannot serve layer {choice.layer}: {name} does not update "
                    "a part of a tensor or of a model, because each step needs all gradients",
                    where=f"pin or plan of {choice.layer}",
                    do='pin it to "replicate" or "factor", or leave it to the planner',
                )


@final
class LossOfRanks:
    """The loss of a closure, over all ranks.

    Args:
        comm: the ranks.
        counted: returns the rows, or terms, that this rank has counted so far.
        summed: whether the loss is a sum over rows.
    """

    def __init__(self, comm: Comm, counted: Callable[[], float], *, summed: bool) -> None:
        self._comm, self._counted, self._summed = comm, counted, summed

    def of(self, closure: Callable[[], Any]) -> Any:
        """Call a closure. Return its loss over the rows of all ranks, without a history."""
        before = self._counted()
        loss = closure()
        rows = self._counted() - before
        own = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        told: list[tuple[float, float]] = self._comm.gather_objects((own, rows), _LABEL)
        total = sum(value for value, _ in told) if self._summed else _mean(told)
        if not isinstance(loss, Tensor):
            return total
        return torch.tensor(total, dtype=loss.dtype, device=loss.device)


def _mean(told: Sequence[tuple[float, float]]) -> float:
    """Return the mean of losses, weighed by rows; without any rows the plain mean.

    A rank without rows may have NaN, which does not count.
    """
    num_rows = sum(rows for _, rows in told)
    if not num_rows:
        return sum(loss for loss, _ in told) / len(told)
    return sum(loss * rows for loss, rows in told if rows) / num_rows
