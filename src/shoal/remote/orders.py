"""Orders to servers: what they are to do beside the workers (servers/servers.py).

    OrdersDone                      there is nothing more
    Duplex                          measure the links, with all workers
    OpenModel, OpenTables           take part in a model, or have its tables
    OpenWeights                     have a model's weights, of workers that step by themselves
    ToModel(SumGradients, …)        do a server's part of what the workers of a model do
    CloseModel, CloseTables         take no part any more, and forget it

What workers and servers both know crosses by number: a model, its transfers that servers take part
in, the parameters of a transfer, and a server's own pieces of it. An order of an ordinary step fits
into its head, so it is one message of the network (docs/lab/decisions.md). On the wire an order has
the name of its class, or its `tag`, which is shorter. Guarded by
tests/remote/test_orders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError, WorldError
from shoal.core.placement import Owner
from shoal.remote import channel
from shoal.remote.optimizers import OptimizerForm
from shoal.remote.wire import Data, Message, MessagePart, MessageReader, Written, written

_HEAD_BYTES = 1 << 12
# by number of the transfer, and of the server's piece of it
Values = dict[int, dict[int, Tensor]]
# of parameters: the number of a transfer that has it, and its own there
Numbers = tuple[tuple[int, int], ...]
Residuals = dict[str, dict[str, Tensor]]  # by parameter name, and what it is


class ParameterForm(MessagePart, frozen=True):
    """A parameter without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class ServedSite(MessagePart, frozen=True):
    """A site in which servers take part."""

    strategy: str
    exchange: str
    label: str
    parameters: dict[str, ParameterForm]
    owners: dict[str, Owner]  # of those that are owned whole
    spans: dict[str, tuple[int, int]]  # of those of which it has a part


class TableForm(MessagePart, frozen=True):
    """A table without values."""

    name: str
    rows: int
    width: int
    dtype: torch.dtype


class PieceOrder(MessagePart, frozen=True):
    """The order to update one piece."""

    group: int  # whose settings count
    at_owner: bool  # whether the owner has the gradient that counts
    gradient: Tensor | None  # otherwise


class OwnersRole:
    """What a server does for one model; what its workers never ask of it, it does not have."""

    def start(self) -> None:
        """Answer each worker by itself from here on."""
        raise _unasked("start")

    def take_values(self, values: Values) -> None:
        """Have these values of the own pieces."""
        raise _unasked("take_values")

    def take_state(self, optimizer: int, states: Sequence[Mapping[int, Data]]) -> None:
        """Have this state of the own pieces, by transfer and piece."""
        raise _unasked("take_state")

    def exchange(self) -> None:
        """Sum what workers send after a backward."""
        raise _unasked("exchange")

    def update(self, order: UpdatePieces) -> None:
        """Update own pieces, and send them back."""
        raise _unasked("update")

    def gather_state(self, optimizer: int) -> None:
        """Give workers the state of the own pieces."""
        raise _unasked("gather_state")

    def gather_values(self) -> None:
        """Give workers the values of the own pieces."""
        raise _unasked("gather_values")

    def fetch_all(self) -> None:
        """Give workers the gradients of the own pieces."""
        raise _unasked("fetch_all")

    def bound_errors(self, most_error: float) -> None:
        """Have codecs be off by no more than that."""
        raise _unasked("bound_errors")

    def sum_residuals(self) -> None:
        """Add what codecs have lost here to what they have lost at workers."""
        raise _unasked("sum_residuals")

    def take_residuals(self, sums: Residuals) -> None:
        """Owe what all ranks owed together, of the own pieces."""
        raise _unasked("take_residuals")

    def norms(self, parameters: Numbers, order: float) -> None:
        """Give workers the norm of the own pieces' gradients."""
        raise _unasked("norms")

    def scale(self, parameters: Numbers, factor: Tensor) -> None:
        """Multiply the own pieces' gradients."""
        raise _unasked("scale")


def _unasked(order: str) -> WorldError:
    return WorldError(
        f"rank 0 asks a server for {order}, which workers of this model do not",
        do="start every rank with the same version of Shoal",
        rank=0,
    )


class ModelOrder(Message, frozen=True):
    """What a server is to do for one model."""

    def do(self, owners: OwnersRole) -> None:
        """Have it done."""
        raise NotImplementedError


class AnswerEachWorker(ModelOrder, frozen=True, tag="Start"):
    """Workers run ahead of one another from here on: answer each."""

    def do(self, owners: OwnersRole) -> None:
        owners.start()


class TakeValues(ModelOrder, frozen=True):
    """These are the values of the server's pieces."""

    values: Values

    def do(self, owners: OwnersRole) -> None:
        owners.take_values(self.values)


class TakeState(ModelOrder, frozen=True):
    """This is an optimizer's state of the server's pieces, by transfer and piece."""

    optimizer: int
    states: tuple[dict[int, Data], ...]

    def do(self, owners: OwnersRole) -> None:
        owners.take_state(self.optimizer, self.states)


class SumGradients(ModelOrder, frozen=True, tag="Exchange"):
    """A backward: sum what workers send."""

    def do(self, owners: OwnersRole) -> None:
        owners.exchange()


class UpdatePieces(ModelOrder, frozen=True):
    """A step of an optimizer: update these pieces, by transfer and piece, and send them back."""

    optimizer: int
    given: dict[int, dict[int, PieceOrder]]
    groups: Data  # settings
    attributes: Data

    def do(self, owners: OwnersRole) -> None:
        owners.update(self)

    def only(self, transfers: Sequence[int]) -> UpdatePieces:
        """The part of it that concerns these transfers."""
        pieces_of = {number: pieces for number, pieces in self.given.items() if number in transfers}
        return UpdatePieces(self.optimizer, pieces_of, self.groups, self.attributes)


class GatherState(ModelOrder, frozen=True):
    """Gather an optimizer's state, with all workers."""

    optimizer: int

    def do(self, owners: OwnersRole) -> None:
        owners.gather_state(self.optimizer)


class GatherValues(ModelOrder, frozen=True):
    """Gather the parameters, with all workers, who stand still meanwhile."""

    def do(self, owners: OwnersRole) -> None:
        owners.gather_values()


class FetchAll(ModelOrder, frozen=True):
    """Bring all gradients to all workers."""

    def do(self, owners: OwnersRole) -> None:
        owners.fetch_all()


class BoundErrors(ModelOrder, frozen=True):
    """Codecs may be off by so much."""

    most_error: float

    def do(self, owners: OwnersRole) -> None:
        owners.bound_errors(self.most_error)


class SumResiduals(ModelOrder, frozen=True):
    """Sum what codecs have lost, with all workers."""

    def do(self, owners: OwnersRole) -> None:
        owners.sum_residuals()


class TakeResiduals(ModelOrder, frozen=True):
    """All ranks owed this together of parameters of which the server has pieces."""

    sums: Residuals

    def do(self, owners: OwnersRole) -> None:
        owners.take_residuals(self.sums)


class Norms(ModelOrder, frozen=True):
    """Gather the norms of these parameters' gradients, with all workers."""

    parameters: Numbers
    order: float

    def do(self, owners: OwnersRole) -> None:
        owners.norms(self.parameters, self.order)


class ScaleGradients(ModelOrder, frozen=True, tag="Scale"):
    """Multiply these parameters' gradients."""

    parameters: Numbers
    factor: Tensor

    def do(self, owners: OwnersRole) -> None:
        owners.scale(self.parameters, self.factor)


AnyModelOrder = (
    AnswerEachWorker
    | TakeValues
    | TakeState
    | SumGradients
    | UpdatePieces
    | GatherState
    | GatherValues
    | FetchAll
    | BoundErrors
    | SumResiduals
    | TakeResiduals
    | Norms
    | ScaleGradients
)


class ServerRole(Protocol):
    """What a server does for all models."""

    def measure_duplex(self, lanes: int, nbytes: int) -> None: ...
    def open_model(self, order: OpenModel) -> None: ...
    def open_tables(self, order: OpenTables) -> None: ...
    def open_weights(self, order: OpenWeights) -> None: ...
    def do_for_model(self, order: ToModel) -> None: ...
    def close_model(self, number: int) -> None: ...
    def close_tables(self, number: int) -> None: ...


class ServerOrder(Message, frozen=True):
    """An order to a server."""

    def do(self, server: ServerRole) -> None:
        """Have it done."""
        raise NotImplementedError


class OrdersDone(ServerOrder, frozen=True, tag="End"):
    """Nothing more follows."""


class Duplex(ServerOrder, frozen=True):
    """Measure what the links keep of their rate while both directions are in use."""

    lanes: int
    nbytes: int

    def do(self, server: ServerRole) -> None:
        server.measure_duplex(self.lanes, self.nbytes)


class OpenModel(ServerOrder, frozen=True):
    """Take part in a model."""

    sites: tuple[ServedSite, ...]
    optimizers: tuple[OptimizerForm, ...]
    lanes: int
    staleness: int | None

    def do(self, server: ServerRole) -> None:
        server.open_model(self)


class OpenTables(ServerOrder, frozen=True):
    """Make tables, of zeros."""

    tables: tuple[TableForm, ...]
    optimizers: tuple[OptimizerForm, ...]
    staleness: int | None

    def do(self, server: ServerRole) -> None:
        server.open_tables(self)


class OpenWeights(ServerOrder, frozen=True):
    """Have these weights, a slice a transfer, of workers that step by themselves."""

    slices: tuple[Tensor, ...]
    lanes: int
    staleness: int | None

    def do(self, server: ServerRole) -> None:
        server.open_weights(self)


class ToModel(ServerOrder, frozen=True):
    """Do something for one model."""

    model: int
    # of each transfer, the parameters whose gradients owners have; None: as before
    held: tuple[tuple[int, ...], ...] | None
    order: AnyModelOrder

    def do(self, server: ServerRole) -> None:
        server.do_for_model(self)


class CloseModel(ServerOrder, frozen=True):
    """Forget a model: its workers go on without servers."""

    number: int  # of those that were opened

    def do(self, server: ServerRole) -> None:
        server.close_model(self.number)


class CloseTables(ServerOrder, frozen=True):
    """Forget the tables of a model: workers have them themselves."""

    number: int  # of those that were opened

    def do(self, server: ServerRole) -> None:
        server.close_tables(self.number)


AnyOrder = (
    OrdersDone | Duplex | OpenModel | OpenTables | OpenWeights | ToModel | CloseModel | CloseTables
)
StepOrder = OrdersDone | UpdatePieces  # of a worker that runs ahead


@dataclass(frozen=True)
class OfRank:
    """An order that is another for each server."""

    of: Callable[[int], AnyModelOrder]


class Tell(Protocol):
    """Has the servers do their part of what the workers of a model do."""

    def __call__(self, order: AnyModelOrder | OfRank, /) -> None: ...


def order_for(rank: int, order: AnyModelOrder | OfRank) -> AnyModelOrder:
    """The order as it is for one server."""
    return order.of(rank) if isinstance(order, OfRank) else order


def written_order(order: ServerOrder | UpdatePieces) -> Written:
    """An order as bytes.

    Raises:
        UsageError: something of an optimizer cannot be sent.
    """
    try:
        return written(order)
    except UsageError as error:
        raise UsageError(
            "the optimizer cannot be sent to the servers",
            got=error.got,
            expected=error.expected,
            do="keep plain data in its attributes, groups and state, or train without servers",
        ) from error


def send_orders(orders: Mapping[int, Written], comm: Comm) -> None:
    """Send each rank its order."""
    # order 3: to all servers at once
    sends = [
        send
        for rank, order in orders.items()
        for send in channel.send(order, rank, comm, _HEAD_BYTES)
    ]
    for pending, _ in sends:
        pending.wait()


def receive_order(reader: MessageReader[Any], source: int, comm: Comm) -> Any:
    """Wait for an order.

    Raises:
        WorldError: what comes is none.
    """
    return channel.receive(reader, source, comm, _HEAD_BYTES)
