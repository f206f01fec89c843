"""Servers: ranks that own parameters and train nothing, and how they are told what to do.

    worker 0                                   every server
      2  `Servers._send`  writes an order  ──▶ 4  `serve`           reads it, and has it done
                                               6  `_RunningServer`  finds the model it is for
                                               7  `InStep`          does its part of it, over the
                                                                    lanes that workers use

A server holds the same transfers, updates and lanes as a worker, without the model: it sums,
updates and sends its slices whenever the workers do. Of its tensors it touches its own slices only,
and memory that nobody touches is never taken. The walk of one order:
docs/ideas/walk-server-order.md. Guarded by tests/equivalence/test_servers.py.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the
split in which workers serve a share too: Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import final

from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer
from shoal.engine.engine import Engine
from shoal.engine.lanes import Lane
from shoal.exchange.direct import Direct
from shoal.optim.owners import values_of
from shoal.optim.update import PieceUpdate
from shoal.profiling.paces import probe_duplex
from shoal.profiling.updates import form_of, made_of, settings
from shoal.remote.orders import (
    AnyModelOrder,
    AnyOrder,
    CloseModel,
    CloseTables,
    Duplex,
    OfRank,
    OpenModel,
    OpenTables,
    OpenWeights,
    OrdersDone,
    ServedSite,
    ServerOrder,
    TableForm,
    Tell,
    ToModel,
    UpdatePieces,
    order_for,
    receive_order,
    send_orders,
    written_order,
)
from shoal.remote.tables import Tables
from shoal.remote.wire import Data, MessageReader
from shoal.servers.ahead import AheadModel, RunningAhead
from shoal.servers.geo import GeoModel
from shoal.servers.geo import end as end_geo
from shoal.servers.in_step import InStep, transfers_of
from shoal.servers.tables import ServedTables
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.server import shares

_CHANNEL, _BESIDE = "orders", "model{}-beside"
_OfModel = InStep | AheadModel | GeoModel


@final
class Servers:
    """The servers, as workers see them. Every worker has one, and worker 0 speaks for all.

    Args:
        comm: all ranks, servers among them.
    """

    def __init__(self, comm: Comm) -> None:
        self.hosts = comm.topology.hosts[comm.workers :]
        self._comm = comm
        orders = comm.channel(_CHANNEL, idle=True)
        self._lane = Lane(orders, "orders") if comm.rank == 0 else None
        self._ended = False
        self._model_numbers, self._table_numbers = count(), count()
        self._models: dict[int, tuple[OwnedTransfer, ...]] = {}
        self._beside: dict[int, Comm] = {}  # of models whose workers run ahead
        self._ends: dict[int, Callable[[], None]] = {}  # of models that answer each worker
        self._tables: dict[Tables, int] = {}

    def duplex(self, lanes: int, nbytes: int) -> float:
        """What each direction of the links keeps of its rate while both are in use (a collective).

        Args:
            lanes: how many buckets go, and come, at once.
            nbytes: of a bucket, the same on every rank.
        """
        self._send(lambda server: Duplex(lanes, nbytes))
        return _duplex(self._comm, lanes, nbytes)

    def open(
        self,
        sites: Sequence[ServedSite],
        transfers: Sequence[OwnedTransfer],
        optimizers: Sequence[Optimizer],
        lanes: int,
        staleness: int | None,
    ) -> tuple[int, list[Comm], list[Comm]]:
        """Let servers take their part of a model: its number, and the ways there and back.

        A collective of all ranks.

        Args:
            sites: what servers take part in.
            transfers: the workers' own side of it, in the same order.
            optimizers: what updates the parameters.
            lanes: how many exchanges are in flight at once.
            staleness: how many steps a worker may run ahead; None: any number.
        """
        model = next(self._model_numbers)
        self._models[model] = tuple(transfers)
        order = OpenModel(tuple(sites), tuple(map(form_of, optimizers)), lanes, staleness)
        self._send(lambda server: order)
        there, back = ways(self._comm, model, lanes)
        if staleness != 0:
            self._beside[model] = self._comm.channel(_BESIDE.format(model))
        return model, there, back

    def open_weights(
        self, transfers: Sequence[GeoTransfer], lanes: int, staleness: int | None
    ) -> tuple[int, list[Comm]]:
        """Let servers have a model's weights, whose workers step by themselves: its number, and
        the ways to them. They come back as they go.

        A collective of all ranks.

        Args:
            transfers: in the order in which they go.
            lanes: how many are in flight at once.
            staleness: how many rounds a worker may run ahead; None: any number.
        """
        model = next(self._model_numbers)
        for number, transfer in enumerate(transfers):
            transfer.number = number
        self._send(
            lambda server: OpenWeights(
                tuple(transfer.slice_of(server) for transfer in transfers), lanes, staleness
            )
        )
        return model, weight_ways(self._comm, model, lanes)

    def step_alone(
        self, model: int, engine: Engine, transfers: Sequence[GeoTransfer], lanes: int
    ) -> None:
        """This engine runs the transfers of such a model: its servers hear when it ends."""
        self._ends[model] = partial(end_geo, engine, transfers, lanes)

    def leave(self, model: int) -> None:
        """Tell servers that answer each worker that this one has ended."""
        if model in self._ends:
            self._ends.pop(model)()

    def open_tables(
        self, forms: Sequence[TableForm], optimizers: Sequence[Optimizer], staleness: int | None
    ) -> Tables:
        """Have the servers make tables of these forms, of zeros: the way to them.

        A collective of all ranks.
        """
        order = OpenTables(tuple(forms), tuple(map(form_of, optimizers)), staleness)
        self._send(lambda server: order)
        number = next(self._table_numbers)
        channel = self._comm.channel(f"tables{number}")
        tables = Tables(channel, in_step=staleness == 0)
        self._tables[tables] = number
        return tables

    def tell(self, model: int, engine: Engine, staleness: int | None) -> Tell:
        """How to tell a model's servers what its workers do. They are given the parameters."""
        tell = partial(self._tell, model)
        for number, transfer in enumerate(self._models[model]):
            parameters = set(transfer.parameters)
            tell(OfRank(partial(values_of, {number: transfer}, parameters)))
        if staleness == 0:
            return tell
        servers, lanes = range(self._comm.workers, self._comm.size), len(engine.routes.served)
        beside = self._beside.pop(model)
        ahead = RunningAhead(engine, self._models[model], servers, lanes, tell, beside)
        self._ends[model] = ahead.end
        return ahead

    def close_model(self, model: int) -> None:
        """Have the servers forget a model whose workers go on without them."""
        self._models.pop(model, None)
        self._send(lambda server: CloseModel(model))

    def close_tables(self, tables: Tables) -> None:
        """Have the servers forget a model's tables, which workers have themselves now."""
        number = self._tables.pop(tables)
        tables.end()
        tables.comm.close()
        self._send(lambda server: CloseTables(number))

    def drain(self) -> None:
        """Let the servers finish, and end. Nothing more can be told them."""
        if self._ended:
            return
        self._ended = True
        for model in list(self._ends):
            self.leave(model)
        for tables in self._tables:
            tables.end()
        if self._lane is not None:
            self._send(lambda server: OrdersDone())
            self._lane.drain()

    def abandon(self) -> None:
        """Leave what is still to be sent: this rank ends for an error."""
        if self._lane is not None:
            self._lane.abandon()

    def close(self) -> None:
        """End the thread that sends."""
        if self._lane is not None:
            self._lane.close()

    def _tell(self, model: int, order: AnyModelOrder | OfRank, /) -> None:
        held = tuple(
            tuple(i for i, p in enumerate(transfer.parameters) if p in transfer.held)
            for transfer in self._models[model]
        )

        def for_server(server: int) -> ToModel:
            content = order_for(server, order)
            # an update says so itself, piece by piece
            known = isinstance(content, UpdatePieces)
            return ToModel(model, None if known else held, content)

        self._send(for_server)

    def _send(self, order: Callable[[int], ServerOrder]) -> None:
        """Send each server its order."""
        if self._lane is None:
            return
        self._lane.check("an order to the servers")
        servers = range(self._comm.workers, self._comm.size)
        # order 2: as of now. What cannot be sent is refused here
        orders = {server: written_order(order(server)) for server in servers}
        self._lane.run(partial(send_orders, orders), "order to servers")


def check_sendable(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for an optimizer that cannot be described to servers."""
    written_order(OpenTables((), tuple(map(form_of, optimizers)), None))
    for optimizer in optimizers:
        groups = [settings(group) for group in optimizer.param_groups]
        written_order(UpdatePieces(0, {}, Data(groups), Data(None)))


def _duplex(comm: Comm, lanes: int, nbytes: int) -> float:
    return probe_duplex(
        comm, Direct(), shares(comm.workers, comm.size - comm.workers), lanes, nbytes
    )


def ways(
    comm: Comm, model: int, lanes: int, *, idle: bool = False
) -> tuple[list[Comm], list[Comm]]:
    """Channels of a model's served transfers, among all ranks: there, and back.

    `idle` at servers that wait for workers who run ahead: those compute for as long as they like.
    """
    there, back = (
        [comm.channel(f"model{model}-{way}{i}", idle=idle) for i in range(lanes)]
        for way in ("there", "back")
    )
    return there, back


def weight_ways(comm: Comm, model: int, lanes: int, *, idle: bool = False) -> list[Comm]:
    """Channels among all ranks for a model's weights, there and back; `idle` as for `ways`."""
    return [comm.channel(f"model{model}-weights{i}", idle=idle) for i in range(lanes)]


def serve(comm: Comm) -> list[Counter[int]]:
    """Be a server until the workers have ended.

    Args:
        comm: all ranks, of which this is one of the last.

    Returns:
        For each model that was not closed, and all tables of one, how often a worker was given
        parameters when it was ahead of the slowest by how many steps; nothing where workers keep
        step.

    Raises:
        WorldError: a rank was lost.
    """
    lane = Lane(comm.channel(_CHANNEL, idle=True), "orders")
    server, reader = _RunningServer(comm), MessageReader[AnyOrder](AnyOrder)
    # after an error nothing is closed: threads may wait for messages that will not come
    while True:
        received: SimpleQueue[AnyOrder] = SimpleQueue()
        # order 4: the lane's thread reads, so that this one sees meanwhile if a rank was lost
        errand = lane.run(partial(_read, reader, received), "orders")
        errand.wait("serving", meanwhile=server.check)
        order = received.get()
        if isinstance(order, OrdersDone):
            break
        order.do(server)  # order 5
    server.finish()
    lane.close()
    return server.observed()


def _read(reader: MessageReader[AnyOrder], received: SimpleQueue[AnyOrder], comm: Comm) -> None:
    received.put(receive_order(reader, 0, comm))


@final
class _RunningServer:
    """A server that runs: its part of each model, and the tables of some."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._model_numbers, self._table_numbers = count(), count()
        self._models: dict[int, _OfModel] = {}
        self._tables: dict[int, ServedTables] = {}

    def measure_duplex(self, lanes: int, nbytes: int) -> None:
        """Measure the links, with all ranks."""
        _duplex(self._comm, lanes, nbytes)

    def open_model(self, order: OpenModel) -> None:
        """Take part in a model."""
        comm, number = self._comm, next(self._model_numbers)
        transfers = tuple(transfers_of(order.sites, comm, stale=order.staleness != 0))
        updates = [
            {transfer: PieceUpdate(made_of(form), transfer) for transfer in transfers}
            for form in order.optimizers
        ]
        there, back = ways(comm, number, order.lanes, idle=order.staleness != 0)
        if order.staleness == 0:
            self._models[number] = InStep(transfers, updates, there, back)
        else:
            beside = comm.channel(_BESIDE.format(number), idle=True)
            self._models[number] = AheadModel(
                transfers, updates, there, back, beside, order.staleness
            )

    def open_tables(self, order: OpenTables) -> None:
        """Make tables."""
        number = next(self._table_numbers)
        channel = self._comm.channel(f"tables{number}", idle=True)
        self._tables[number] = ServedTables(
            channel, order.tables, order.optimizers, order.staleness
        )

    def open_weights(self, order: OpenWeights) -> None:
        """Have a model's weights."""
        number = next(self._model_numbers)
        lanes = weight_ways(self._comm, number, order.lanes, idle=True)
        self._models[number] = GeoModel(order.slices, lanes, order.staleness)

    def close_model(self, number: int) -> None:
        """Forget a model."""
        self._end(self._models.pop(number))

    def close_tables(self, number: int) -> None:
        """Forget the tables of a model."""
        self._end(self._tables.pop(number))

    def do_for_model(self, order: ToModel) -> None:
        """Do something for a model."""
        # order 6: find the model, and note the parameters whose gradients owners have
        model = self._models[order.model]
        if order.held is not None:
            for transfer, numbers in zip(model.transfers, order.held, strict=True):
                transfer.held = {transfer.parameters[number] for number in numbers}
        order.order.do(model)

    def check(self) -> None:
        """Raise the error of a thread that has ended with one."""
        for part in self._parts:
            part.check()

    def finish(self) -> None:
        """Finish what workers wait for, and end."""
        for part in self._parts:
            self._end(part)

    def observed(self) -> list[Counter[int]]:
        """Of each model, and all tables of one, by how many steps workers were ahead."""
        return [part.observed() for part in self._parts]

    @property
    def _parts(self) -> list[_OfModel | ServedTables]:
        return [*self._models.values(), *self._tables.values()]

    def _end(self, part: _OfModel | ServedTables) -> None:
        part.finish(self.check)
        part.close()
