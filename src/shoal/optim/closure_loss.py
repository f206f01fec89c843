"""Optimizers that steer by a closure's loss (LBFGS): every rank gives them the mean of all ranks.

A rank's own loss differs, so ranks would search along lines of their own. Costs one number from
each rank for each call of the closure. Guarded by tests/equivalence/test_lbfgs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from shoal.contracts.comm import Comm

_LABEL = "the loss of a closure"


def steers_by_loss(optimizer: Optimizer) -> bool:
    """Return whether steps depend on the number that a closure returns."""
    return isinstance(optimizer, LBFGS)


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
        if self._summed:
            total = sum(value for value, _ in told)
        else:
            weights = [rows for _, rows in told] if any(rows for _, rows in told) else None
            total = _mean([value for value, _ in told], weights)
        if not isinstance(loss, Tensor):
            return total
        return torch.tensor(total, dtype=loss.dtype, device=loss.device)


def _mean(values: list[float], weights: list[float] | None) -> float:
    """Return the mean of the values. A rank without rows may have NaN, which does not count."""
    if weights is None:
        return sum(values) / len(values)
    pairs = zip(values, weights, strict=True)
    return sum(value * weight for value, weight in pairs if weight) / sum(weights)
