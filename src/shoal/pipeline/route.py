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
from shoal.tensors.row_crossing import EXACT, RowCrossing

EACH = -1  # stands in the place of a rank: each rank computes the station for its own rows


@dataclass(frozen=True)
class StationRoute:
    """The way of a micro-batch through the ranks, for calls of one kind.

    Args:
        record: the forward.
        spans: the events of each station.
        holders: the rank of each station; `EACH` if every rank has its layers.
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

    def of(self, *ranks: int) -> list[int]:
        """Return the stations of these ranks."""
        return [number for number, holder in enumerate(self.holders) if holder in ranks]

    def holder(self, station: int, own: int) -> int:
        """Return the rank that computes a station for rows of rank `own`."""
        return own if self.holders[station] == EACH else self.holders[station]

    def inputs_of(self, *ranks: int) -> set[int]:
        """Return the numbers of the inputs that the stations of these ranks use."""
        needed = [
            self.record.inputs_between(self.spans[station].begin, self.spans[station].end)
            for station in self.of(*ranks)
        ]
        return set[int]().union(*needed)


@final
class Coming:
    """Tensors that come from another rank. Their receives have begun.

    Args:
        comm: the ranks.
        source: the rank that sends them.
        like: their shapes and types.
        device: the device that they come to.
        crossing: reads codes, if values come as codes.
    """

    def __init__(
        self,
        comm: Comm,
        source: int,
        like: Sequence[Shape],
        device: Any,
        crossing: RowCrossing = EXACT,
    ) -> None:
        self._comm, self._crossing = comm, crossing
        self._dtypes = [dtype for _, dtype in like]
        forms = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in like]
        self._coded = [is_coded(crossing, form) for form in forms]
        self._landing = [
            crossing.landing(form, device) if coded else torch.empty_like(form, device=device)
            for form, coded in zip(forms, self._coded, strict=True)
        ]
        self._pending = [comm.receive(t, source) for t in self._landing if t.numel()]

    def wait(self) -> list[Tensor]:
        """Wait for all of them."""
        self._comm.finish(self._pending)
        return [
            self._crossing.from_code(landed, dtype) if coded else landed
            for landed, dtype, coded in zip(self._landing, self._dtypes, self._coded, strict=True)
        ]


def is_coded(crossing: RowCrossing, tensor: Tensor) -> bool:
    """Return whether a value that crosses goes as a code. Vectors and numbers go as they are."""
    return tensor.dim() > 1 and crossing.narrows(tensor)


@final
class Outbox:
    """Tensors that are on their way to other ranks.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.crossing = EXACT  # of values behind layers, and of their gradients
        self._pending: list[tuple[Pending, Tensor]] = []

    def send(self, tensor: Tensor, to: int, crossing: RowCrossing = EXACT) -> None:
        """Begin to send a tensor, which must not change, or the code of it."""
        code = crossing.narrow(tensor) if is_coded(crossing, tensor) else None
        tensor = tensor.detach().contiguous() if code is None else code
        if tensor.numel():
            self._pending.append((self._comm.send(tensor, to), tensor))

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        self._comm.finish([pending for pending, _ in self._pending])
        self._pending.clear()
