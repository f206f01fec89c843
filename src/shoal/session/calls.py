"""Calls of a parallelised model: which one is inside another, and how many rows each has.

A call inside another, as of a model that calls itself, is a part of it. What computes a loss of a
whole batch is one call, whatever it calls of the model.
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

    Of a call that was broken off (Ctrl-C) torch calls no hooks: its frame is gone.
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
        """Note a call that this frame makes; whether it is to be weighed.

        It is not inside of another one, nor where gradients are off.
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
        """The weight of the call that ends; None for one that is not weighed."""
        return self._running.pop()[1] if self._running else None


def _is_under(frame: FrameType | None, other: FrameType) -> bool:
    """Whether `other` has called, by way of any others, what runs in `frame`."""
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None


@final
class Counting:
    """Counts the rows of calls, or the terms of their losses.

    Args:
        border: the model's.
        weigher: tells the other ranks, where they are to know.
        terms: where the rows are seen.
        by_loss: whether the loss weighs itself, and goes over the border, too.
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
        """A call begins: its weight, and what is to be called with.

        None while all of the model is frozen, as a critic is in its generator's step: no gradient
        comes of the call that would be weighed or sent.
        """
        border = self._border
        border.engine.routes.hear()
        border.check()
        if not border.trains:
            return None
        border.engine.happened(Event.FORWARD_ENTERED)
        weight = self._weigher.begin()
        if self._count is not None:
            self._counted(weight, number_of(self._count, inputs), inputs)
        elif self._terms.source == INPUT:
            self._counted(weight, count_of(self._terms, inputs), inputs)
        return weight, border.inward(inputs, weight)

    def hear(self) -> None:
        """Raise the verdict on this job, once, in a call that is not weighed, as in evaluation."""
        self._border.engine.routes.hear(again=False)

    def ended(self, weight: Weight, inputs: Any, output: Any) -> Any:
        """It ends: the output to return, or None for the same."""
        if output is None:  # it has failed, or gives nothing
            return None
        if self._terms.source == OUTPUT:
            self._counted(weight, count_of(self._terms, output), inputs)
        if self._terms.kept:
            self._border.outward_kept(weight)
        return self._border.outward(output, weight)

    def summed(self, rows: Weight | None, loss: Any) -> Any:
        """The same loss, which is a sum over rows, and may go with what comes of these rows."""
        return self.weighed(self._weigher.of_sum(rows), loss)

    def of_terms(self, count: float, rows: Weight | None, batch: Any, loss: Any) -> Any:
        """Weigh a loss, which is a mean over so many terms, beside values that come of rows."""
        return self.weighed(self._weigher.of_loss(count, rows, batch), loss)

    def weighed(self, weight: Weight, loss: Any) -> Any:
        """The same loss, of a weight of its own."""
        border = self._border
        border.engine.called(weight, asks=True)
        border.weigh_parameters()
        return border.outward(loss, weight)

    def _counted(self, weight: Weight, count: float, batch: Any) -> None:
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
    """The number of terms that `count` gives (UsageError where it is none)."""
    with torch.no_grad():
        found = count(*arguments)
    try:
        number = float(found)
    except (TypeError, ValueError, RuntimeError):  # also of a tensor with several numbers
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
