"""Buffers that a forward changes, where several micro-batches go through one module.

Each micro-batch begins with the same values, as each rank's own batch does elsewhere. Behind the
last one a buffer has the mean of the values after each, weighed by rows, or the first one's value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.state import TensorSlot
from shoal.pipeline.absent_tensors import Absent


@dataclass(frozen=True)
class CountingBuffer:
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

    def __init__(self, countings: Sequence[CountingBuffer]) -> None:
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
        """The present value."""
        tensor = self.slot.tensor
        assert tensor is not None
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Put a tensor there. A frozen parameter stays itself, with these values."""
        if self.slot.is_buffer:
            self.slot.put(tensor)
        elif tensor is not self.value:
            with torch.no_grad():
                self.value.copy_(tensor)


@contextmanager
def aside(buffers: Sequence[MovingBuffer]) -> Iterator[None]:
    """Let forward change copies of buffers inside: their values come from another rank."""
    own = [buffer.value for buffer in buffers]
    before = [value.detach().clone() for value in own]
    for buffer, value in zip(buffers, before, strict=True):
        if buffer.slot.is_buffer:
            buffer.put(value)
    try:
        yield
    finally:
        for buffer, value, kept in zip(buffers, own, before, strict=True):
            buffer.put(value if buffer.slot.is_buffer else kept)


@final
class MovingBuffers:
    """The buffers of a rank's layers, over the micro-batches of one call.

    Each micro-batch has tensors of its own in their places, because autograd may keep these. It has
    them in all stations of this rank. Behind the last one the buffers themselves come back.

    Args:
        buffers: the buffers that training changes.
    """

    def __init__(self, buffers: Sequence[MovingBuffer]) -> None:
        self._buffers = buffers
        self._own = [buffer.value for buffer in buffers]
        self._before = [own.detach().clone() for own in self._own]
        self._values: dict[int, list[Tensor]] = {}  # values of each micro-batch

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        """Give the buffers the values of a micro-batch inside.

        At first it has the values from before the call.
        """
        values = self._values.get(number, self._before)
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.put(value.clone())
        try:
            yield
        finally:
            self._values[number] = [
                # forward has put an absent tensor there if another station computes the value
                (value if isinstance(buffer.value, Absent) else buffer.value).detach().clone()
                for buffer, value in zip(self._buffers, values, strict=True)
            ]
            for buffer, own in zip(self._buffers, self._own, strict=True):
                buffer.put(own)

    @torch.no_grad()
    def join_ranks(self, comm: Comm, rows: Sequence[float]) -> None:
        """As `join`, of the one micro-batch that each rank has computed (a collective)."""
        for value in self._values.pop(0):
            after = value.new_empty(comm.size, *value.shape)
            comm.all_gather(list(after.unbind()), value.contiguous())
            for rank, each in enumerate(after.unbind()):
                self._values.setdefault(rank, []).append(each)
        self.join(rows)

    @torch.no_grad()
    def join(self, rows: Sequence[float]) -> None:
        """Give each buffer its value behind all micro-batches, which have so many rows."""
        weights = torch.tensor(rows, dtype=torch.float64, device="cpu") / max(sum(rows), 1)
        values = [self._values[number] for number in sorted(self._values)]
        for index, (own, before, buffer) in enumerate(
            zip(self._own, self._before, self._buffers, strict=True)
        ):
            after = [each[index] for each in values]
            if all(torch.equal(each, before) for each in after):
                continue
            if not buffer.is_mean:
                own.copy_(after[0])
                continue
            wide = torch.stack(after).to(torch.promote_types(before.dtype, torch.float32))
            shaped = weights.to(wide).view(-1, *[1] * before.dim())
            own.copy_((wide * shaped).sum(0))
