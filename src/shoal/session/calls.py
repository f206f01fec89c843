"""Calls of a parallelised model: nested calls, and the number of rows in each.

A call inside another, for instance of a model that calls itself, is a part of it. A function that
computes the loss of a whole batch is one call, whatever it calls of the model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from shoal.contracts.cadence import Event
from shoal.core.errors import UsageError
from shoal.core.terms import INPUT, OUTPUT, Terms
from shoal.engine.border import Border
from shoal.engine.weights import Weigher, Weight
from shoal.profiling.terms import count_of

Count = Callable[..., float | Tensor]


@final
class Calls:
    """The calls that are running in each thread, by the frame that makes them, with their weights.

    If a call was broken off (Ctrl-C), torch calls no hooks: its frame is gone.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def _running(self) -> list[tuple[FrameType, Weight | None]]:
        running: list[tuple[FrameType, Weight | None]] = self._of_thread.__dict__.setdefault(
            "running", []
        )
        return running

    def enter(self, caller: FrameType) -> bool:
        """Note a call that this frame makes, and return whether to weigh it.

        A call inside another one, or without gradients, is not weighed.
        """
        while self._running and not _is_under(caller, self._running[-1][0]):
            self._running.pop()
        self._running.append((caller, None))
        return (
            len(self._running) == 1
            and torch.is_grad_enabled()
            and not torch._C._are_functorch_transforms_active()
        )

    def weigh(self, weight: Weight) -> None:
        """Note the weight of the call that was entered last."""
        self._running[-1] = (self._running[-1][0], weight)

    def leave(self) -> Weight | None:
        """Return the weight of the call that ends; None for a call that is not weighed."""
        return self._running.pop()[1] if self._running else None


def _is_under(frame: FrameType | None, other: FrameType) -> bool:
    """Return whether `other` has called, directly or through others, the code in `frame`."""
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None


@final
class Counting:
    """Counts the rows of calls, or the terms of their losses.

    Args:
        border: the model's border.
        weigher: tells the other ranks, if they need the number.
        terms: the place where the rows are seen.
        by_loss: whether the loss has its own weight, and crosses the border, too.
        count: gives the number for a call's inputs, in place of `terms`.
    """

    def __init__(
        self,
        border: Border,
        weigher: Weigher,
        terms: Terms,
        *,
        by_loss: bool,
        count: Count | None = None,
    ) -> None:
        self._border, self._weigher, self._terms = border, weigher, terms
        self._count = count
        self.by_loss = by_loss

    def begun(self, inputs: Any) -> tuple[Weight, Any] | None:
        """Begin a call: return its weight, and the inputs to call with.

        Return None while all of the model is frozen, as a critic is in its generator's step: the
        call gives no gradient to weigh or send.
        """
        border = self._border
        border.engine.routes.hear()
        border.check()
        if not border.trains:
            return None
        border.engine.on_event(Event.FORWARD_ENTERED)
        weight = self._weigher.begin()
        if self._count is not None:
            self._set_count(weight, number_of(self._count, inputs), inputs)
        elif self._terms.source == INPUT:
            self._set_count(weight, count_of(self._terms, inputs), inputs)
        return weight, border.inward(inputs, weight)

    def hear(self) -> None:
        """Raise the verdict on this job, once, in a call without a weight, as in evaluation."""
        self._border.engine.routes.hear(again=False)

    def ended(self, weight: Weight, inputs: Any, output: Any) -> Any:
        """End a call: return the output, or None if it stays the same."""
        if output is None:  # the call has failed, or gives nothing
            return None
        if self._terms.source == OUTPUT:
            self._set_count(weight, count_of(self._terms, output), inputs)
        if self._terms.kept:
            self._border.pass_kept_outward(weight)
        return self._border.outward(output, weight)

    def summed(self, rows: Weight | None, loss: Any) -> Any:
        """Weigh a loss that is a sum over rows. It may join values that these rows give."""
        return self.weigh(self._weigher.of_sum(rows), loss)

    def of_terms(self, count: float, rows: Weight | None, batch: Any, loss: Any) -> Any:
        """Weigh a loss that is a mean over so many terms, together with values that rows give."""
        return self.weigh(self._weigher.of_loss(count, rows, batch), loss)

    def weigh(self, weight: Weight, loss: Any) -> Any:
        """Weigh a loss by a weight of its own."""
        border = self._border
        border.engine.called(weight, asks=True)
        border.weigh_parameters()
        return border.outward(loss, weight)

    def _set_count(self, weight: Weight, count: float, batch: Any) -> None:
        border = self._border
        if self.by_loss:
            self._weigher.counted(weight, count)
            border.engine.latest = weight
            return
        self._weigher.counted(weight, count, batch)
        border.engine.called(weight, asks=False)
        if not border.engine.goes_along:
            border.weigh_parameters()


def number_of(count: Count, *arguments: Any) -> float:
    """Return the number of terms that `count` gives (UsageError if it is none)."""
    with torch.no_grad():
        found = count(*arguments)
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):  # a tensor with several numbers fails, too
        number = math.nan
    if not 0 <= number < math.inf:
        takes = "batch" if len(arguments) == 1 else "output, y"
        raise UsageError(
            "count gives no number of terms of the loss",
            got=repr(found)[:80],
            expected="a finite number, at least 0",
            do=f"give for instance count=lambda {takes}: len({takes.split()[-1]})",
        )
    return number
