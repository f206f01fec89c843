"""Buffers that a forward changes, where several micro-batches go through one module.

Each micro-batch begins with the same values, as each rank's own batch does elsewhere. Behind the
last one a buffer has the mean of what they have made of it, weighed by rows, or the first one's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from shoal.contracts.state import TensorSlot


@dataclass(frozen=True)
class Counting:
    """A change of a buffer by constants, such as that of BatchNorm's number of batches.

    Args:
        buffer: the buffer.
        function: changes it, as the forward does.
        args: further arguments of the function.
        kwargs: its arguments by name.
    """

    buffer: Tensor
    function: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@final
class Counters:
    """Buffers that each call of the model changes once, on every rank, whatever replays do.

    Args:
        countings: all their changes in one call.
    """

    def __init__(self, countings: Sequence[Counting]) -> None:
        self._countings = countings
        buffers = {id(each.buffer): each.buffer.data for each in countings}
        self._before = [(buffer, buffer.clone()) for buffer in buffers.values()]

    def put_back(self) -> None:
        """Give the buffers the values from before the call."""
        for buffer, before in self._before:
            buffer.copy_(before)

    @torch.no_grad()
    def count(self) -> None:
        """Change the buffers as one forward does."""
        self.put_back()
        for each in self._countings:
            each.function(each.buffer.data, *each.args, **each.kwargs)


@dataclass(frozen=True)
class MovingBuffer:
    """A buffer that training changes.

    Args:
        slot: its place in a module.
        is_mean: whether ranks have the mean; else rank 0's value counts.
    """

    slot: TensorSlot
    is_mean: bool

    @property
    def value(self) -> Tensor:
        """The present value. Graphs stay valid if it is written, as by batch norm itself."""
        tensor = self.slot.tensor
        assert tensor is not None
        return tensor.data


@final
class MovingBuffers:
    """The buffers of a rank's layers, over the micro-batches of one call.

    Args:
        buffers: those that training changes.
    """

    def __init__(self, buffers: Sequence[MovingBuffer]) -> None:
        self._buffers = buffers
        self._before = [buffer.value.detach().clone() for buffer in buffers]
        self._after: list[list[Tensor]] = [[] for _ in buffers]

    @torch.no_grad()
    def passed(self) -> None:
        """Note what a micro-batch has made, and begin the next as this one began."""
        for buffer, before, after in zip(self._buffers, self._before, self._after, strict=True):
            after.append(buffer.value.detach().clone())
            buffer.value.copy_(before)

    @torch.no_grad()
    def join(self, rows: Sequence[float]) -> None:
        """Give each buffer its value behind all micro-batches, which have so many rows."""
        weights = torch.tensor(rows, dtype=torch.float64) / max(sum(rows), 1)
        for buffer, before, after in zip(self._buffers, self._before, self._after, strict=True):
            if all(torch.equal(each, before) for each in after):
                continue
            if not buffer.is_mean:
                buffer.value.copy_(after[0])
                continue
            wide = torch.stack(after).to(torch.promote_types(before.dtype, torch.float32))
            shaped = weights.to(wide).view(-1, *[1] * before.dim())
            buffer.value.copy_((wide * shaped).sum(0))
