"""The way of micro-batches through the ranks, and messages on that way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal.pipeline.calls import Shape
from shoal.pipeline.record import ForwardRecord
from shoal.pipeline.replay import StationSpan


@dataclass(frozen=True)
class StationRoute:
    """The way of a micro-batch through the ranks, for calls of one kind.

    Args:
        record: the forward.
        spans: the events of each station.
        holders: the rank of each station.
        output: the forward's results, by the number of the call's forms.
    """

    record: ForwardRecord
    spans: Sequence[StationSpan]
    holders: Sequence[int]
    output: dict[int, Any] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The rank of the last station."""
        return self.holders[-1]

    def of(self, rank: int) -> list[int]:
        """Return the stations of a rank."""
        return [number for number, holder in enumerate(self.holders) if holder == rank]

    def inputs_of(self, rank: int) -> set[int]:
        """Return the numbers of the inputs that a rank uses."""
        needed = [
            self.record.inputs_between(self.spans[station].begin, self.spans[station].end)
            for station in self.of(rank)
        ]
        return set[int]().union(*needed)


@final
class Coming:
    """Tensors that come from another rank. Their receives have begun."""

    def __init__(self, comm: Comm, source: int, like: Sequence[Shape], device: Any) -> None:
        self._comm = comm
        self.tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in like]
        self._pending = [comm.receive(t, source) for t in self.tensors if t.numel()]

    def wait(self) -> list[Tensor]:
        """Wait for all of them."""
        self._comm.finish(self._pending)
        return self.tensors


@final
class Outbox:
    """Tensors that are on their way to other ranks.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._pending: list[tuple[Pending, Tensor]] = []

    def send(self, tensor: Tensor, to: int) -> None:
        """Begin to send a tensor, which must not change."""
        tensor = tensor.detach().contiguous()
        if tensor.numel():
            self._pending.append((self._comm.send(tensor, to), tensor))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self._comm.finish([pending for pending, _ in self._pending])
        self._pending.clear()
