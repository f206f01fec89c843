"""Gradients of values that were sent on, as they come back from the next stations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from shoal.pipeline.calls import Shape
from shoal.pipeline.inbox import Inbox
from shoal.pipeline.route import Coming
from shoal.pipeline.schedule import Task

Receive = Callable[[int, Sequence[Shape]], Coming]


@final
class ReturningGradients:
    """The gradients of one call's sent values.

    Without an inbox they come in a backward of all micro-batches, the last micro-batch first.

    Args:
        receive: begins to receive gradients of these forms for a station's values.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._shapes: dict[tuple[int, int], list[Shape]] = {}
        self._coming: dict[tuple[int, int], Coming] = {}
        self.inbox: Inbox | None = None  # receives them in the order of a schedule

    def sent(self, station: int, micro: int, values: Sequence[Tensor]) -> None:
        """Note the values of a micro-batch that take a gradient."""
        self._shapes[station, micro] = [(tuple(value.shape), value.dtype) for value in values]

    def coming(self, station: int, micro: int) -> Coming | None:
        """Begin to receive the gradients of a micro-batch; None if nothing was sent yet."""
        shapes = self._shapes.get((station, micro))
        return None if shapes is None else self._receive(station, shapes)

    def take(self, station: int, micro: int) -> Sequence[Tensor]:
        """Wait for the gradients of a micro-batch."""
        if self.inbox is not None:
            return self.inbox.take(Task(station, micro, is_back=True)).wait()
        if not self._coming:  # the slopes of all losses have come by now
            for at in sorted(self._shapes, reverse=True):
                self._coming[at] = self._receive(at[0], self._shapes[at])
        return self._coming.pop((station, micro)).wait()
