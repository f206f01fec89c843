"""Orders to servers: what a worker has them do, as bytes.

Parameters, pieces and transfers, which workers and servers both know, cross by name and not by
value; all else is pickled. Both ends are one job of one user, as with any message among ranks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.errors import UsageError
from shoal.core.pieces import Piece
from shoal.profiling.updates import attributes, settings

# bytes: of an order's size; of its first message, which is all of an ordinary order
_SIZE, _HEAD = 8, 1 << 12
# model, transfer, and parameter, or rank and piece; () is nothing that servers know
_Name = tuple[int, ...]


@dataclass(frozen=True)
class OfRank:
    """An argument that is another for each server."""

    of: Callable[[int], Any]


def of_rank(rank: int, arguments: Sequence[Any]) -> list[Any]:
    """The arguments as they are for one server."""
    return [each.of(rank) if isinstance(each, OfRank) else each for each in arguments]


@final
class Names:
    """What workers and servers both know."""

    def __init__(self) -> None:
        self._names: dict[int, _Name] = {}  # by id

    def add(self, model: int, transfers: Sequence[OwnedTransfer]) -> None:
        """Name a model's transfers, and all that belongs to them."""
        for number, transfer in enumerate(transfers):
            self._names[id(transfer)] = (model, number)
            self._names |= {
                id(p): (model, number, index) for index, p in enumerate(transfer.parameters)
            }
            for rank, pieces in enumerate(transfer.owned):
                self._names |= {
                    id(piece): (model, number, rank, index) for index, piece in enumerate(pieces)
                }

    def written(self, *order: Any) -> Tensor:
        """An order as bytes (UsageError where something of it cannot be sent)."""
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._names).dump(order)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            do = (
                "define the optimizer's class in a module, with settings that can be pickled; "
                "or serve without servers"
            )
            raise UsageError(
                "the optimizer cannot be sent to the servers", got=str(error)[:200], do=do
            ) from error
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


@final
class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, names: Mapping[int, _Name]) -> None:
        super().__init__(buffer)
        self._names = names

    def persistent_id(self, thing: Any) -> _Name | None:
        if isinstance(thing, nn.Parameter | Piece | OwnedTransfer):
            return self._names.get(id(thing), ())
        return None


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, order: Tensor, models: Sequence[Sequence[OwnedTransfer]]) -> None:
        super().__init__(io.BytesIO(order.numpy().tobytes()))
        self._models = models

    def persistent_load(self, name: _Name) -> Any:
        if not name:
            return None
        model, number, *rest = name
        transfer = self._models[model][number]
        if not rest:
            return transfer
        return transfer.parameters[rest[0]] if len(rest) == 1 else transfer.owned[rest[0]][rest[1]]


def check_sendable(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for an optimizer that cannot be described to servers."""
    for optimizer in optimizers:
        Names().written(
            type(optimizer),
            attributes(optimizer),
            [settings(group) for group in optimizer.param_groups],
        )


def read(order: Tensor, models: Sequence[Sequence[OwnedTransfer]]) -> tuple[Any, ...]:
    """The order that these bytes are, to a server that has these transfers of each model."""
    try:
        content: tuple[Any, ...] = _Unpickler(order, models).load()
    except AttributeError as error:
        do = (
            "define the optimizer's class in a module, or before shoal.init(), "
            "behind which a server's script ends"
        )
        raise UsageError("a server does not know what it is sent", got=str(error), do=do) from error
    return content


def send_orders(orders: Mapping[int, Tensor], comm: Comm) -> None:
    """Send each rank its order: the size and what fits beside it in one message, the rest in
    another.
    """
    sends = []
    for rank, order in orders.items():
        head = torch.zeros(_HEAD, dtype=torch.uint8, device="cpu")
        head[:_SIZE].view(torch.int64)[0] = order.numel()
        head[_SIZE:][: order.numel()] = order[: _HEAD - _SIZE]
        sends += [comm.send(part, rank) for part in (head, order[_HEAD - _SIZE :]) if part.numel()]
    for send in sends:
        send.wait()


def receive_order(source: int, comm: Comm) -> Tensor:
    """Receive an order."""
    head = torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
    comm.receive(head, source).wait()
    order, beside = (
        torch.empty(int(head[:_SIZE].view(torch.int64)), dtype=torch.uint8, device="cpu"),
        _HEAD - _SIZE,
    )
    order[:beside] = head[_SIZE:][: order.numel()]
    if order.numel() > beside:
        comm.receive(order[beside:], source).wait()
    return order
