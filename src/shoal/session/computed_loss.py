"""A `compute_loss` of a parallelised model: its work on a batch is one call of the model.

    1  count     the terms of the batch, before the loss is computed: mostly no rank waits for them
    2  compute   by any way: the model, several calls of it, its modules, its methods
    3  weigh     the loss crosses the model's border, where backward opens the engine's round

Guarded by tests/equivalence/test_compute_loss.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, final
from weakref import ref

from torch import nn

from shoal.contracts.batch_loss import BatchLoss
from shoal.contracts.sample import ComputeLoss, check_computed
from shoal.core.errors import UsageError
from shoal.session.additions import check_bare
from shoal.session.calls import Calls, Count, Counting, number_of
from shoal.session.compiled_models import without_compilation


@final
class Computed:
    """Weighs the loss of a function.

    Args:
        model: the model, which is not kept alive.
        compute_loss: the function.
        counting: counts batches.
        calls: the model's calls. The function's calls are among them.
        summed: whether the loss is a sum over rows.
        count: counts the terms of the loss, if modules keep means over rows for it.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        counting: Counting,
        calls: Calls,
        *,
        summed: bool,
        count: Count | None = None,
    ) -> None:
        self._model = ref(model)
        known = compute_loss if isinstance(compute_loss, BatchLoss) else BatchLoss(compute_loss)
        self._compute_loss, self._known = known.function, known
        self._counting: Counting | None = counting
        self._calls, self._summed, self._count = calls, summed, count

    @property
    def weighs(self) -> bool:
        """Return whether it still weighs."""
        return self._counting is not None

    def release(self) -> None:
        """Stop weighing from now on, and only call the function."""
        self._counting = None

    def go_on(self, counting: Counting, calls: Calls, count: Count | None) -> None:
        """Weigh again, under another plan."""
        self._counting, self._calls, self._count = counting, calls, count

    def function(self) -> Callable[..., Any]:
        """Return the function to call from now on."""
        return called_instead(self._compute_loss, self)

    def __call__(self, model: nn.Module, *batch: Any, **named: Any) -> Any:
        """Compute the loss. Trainers hand it more than a batch, such as a number of tokens."""
        counting, calls = self._counting, self._calls
        if counting is None:
            return self._compute_loss(model, *batch, **named)
        weighs = calls.enter(sys._getframe())
        try:
            if not weighs:
                return self._compute_loss(model, *batch, **named)
            self._check(model)
            if named:
                batch, named = self._known.in_order(batch, named)
            counted = batch if self._known.packed else batch[0]
            begun = counting.begun(counted)  # 1
            if begun is None:
                return self._compute_loss(model, *batch, **named)
            weight, computed_with = begun
            terms = None if self._count is None else number_of(self._count, counted)
            arguments = computed_with if self._known.packed else (computed_with, *batch[1:])
            loss = self._compute_loss(model, *arguments, **named)  # 2
            check_computed(loss)
            loss = counting.ended(weight, counted, loss)  # 3
            if terms is not None:
                return counting.of_terms(terms, weight, counted, loss)
            return counting.summed(weight, loss) if self._summed else loss
        finally:
            calls.leave()

    def _check(self, model: Any) -> None:
        check_bare(own_model(model, self._model()))


def called_instead(given: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `instead`, and looks like the compute_loss that was given."""

    @functools.wraps(given.forward if isinstance(given, nn.Module) else given)
    def wrapped(model: nn.Module, /, *batch: Any, **named: Any) -> Any:
        return instead(model, *batch, **named)

    return wrapped


def own_model(model: Any, own: nn.Module | None) -> nn.Module:
    """Return a compute_loss's own model. Raise UsageError if it is called with another one."""
    if own is None or without_compilation(model) is not own:
        raise UsageError(
            "compute_loss is called with another model than the one that was parallelised with it",
            got=type(model).__name__,
            do="call it with the model that parallelize returned; for another one call your "
            "own function",
        )
    return own
