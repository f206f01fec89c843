"""Servers: ranks that own parameters and train nothing, and the orders that they obey.

    worker 0                                   every server
      2  `Servers._send`  writes an order  ──▶ 4  `serve`           reads it
                                               5  `_RunningServer`  obeys it
                                               6                    finds the model it is for
                                               7  `InStep`          obeys its verb, over the lanes
                                                                    that workers use

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
from typing import assert_never, final

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
    AnyOrder,
    Close,
    Duplex,
    OpenModel,
    OpenTables,
    OpenWeights,
    PerServer,
    ServedSite,
    TableForm,
    Tell,
    receive_order,
    send_orders,
    verb_for,
    written_order,
)
from shoal.remote.tables import Tables
from shoal.remote.verbs import End, MakeStep, PartOrder, Verb, unasked
from shoal.remote.wire import Data, MessageReader
from shoal.servers.ahead_workers import AheadModel, RunningAhead
from shoal.servers.geo import GeoModel
from shoal.servers.geo import end as end_geo
from shoal.servers.step_workers import InStep, transfers_of
from shoal.servers.tables import ServedTables
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.server import shares

_CHANNEL, _BESIDE = "orders", "model{}-beside"
_Part = InStep | AheadModel | GeoModel | ServedTables


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
        self._numbers = count()  # next number of a part
        self._models: dict[int, tuple[OwnedTransfer, ...]] = {}
        self._beside: dict[int, Comm] = {}  # models with workers that run ahead
        self._ends: dict[int, Callable[[], None]] = {}  # models that answer each worker
        self._tables: dict[Tables, int] = {}

    def duplex(self, lanes: int, nbytes: int) -> float:
        """Measure the share of its rate that a direction keeps while both are used (a collective).

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
            sites: the sites in which servers take part.
            transfers: the workers' own side of it, in the same order.
            optimizers: the optimizers that update the parameters.
            lanes: how many exchanges are in flight at once.
            staleness: how many steps a worker may run ahead; None: any number.
        """
        model = next(self._numbers)
        self._models[model] = tuple(transfers)
        order = OpenModel(model, tuple(sites), tuple(map(form_of, optimizers)), lanes, staleness)
        self._send(lambda server: order)
        there, back = ways(self._comm, model, lanes)
        if staleness != 0:
            self._beside[model] = self._comm.channel(_BESIDE.format(model))
        return model, there, back

    def open_weights(
        self, transfers: Sequence[GeoTransfer], lanes: int, staleness: int | None
    ) -> tuple[int, list[Comm]]:
        """Let servers have the weights of workers that step by themselves.

        A collective of all ranks: the number at servers, and the ways to them and back.

        Args:
            transfers: in the order in which they go.
            lanes: how many are in flight at once.
            staleness: how many rounds a worker may run ahead; None: any number.
        """
        model = next(self._numbers)
        for number, transfer in enumerate(transfers):
            transfer.number = number
        self._send(
            lambda server: OpenWeights(
                model, tuple(transfer.slice_of(server) for transfer in transfers), lanes, staleness
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
        number = next(self._numbers)
        order = OpenTables(number, tuple(forms), tuple(map(form_of, optimizers)), staleness)
        self._send(lambda server: order)
        channel = self._comm.channel(f"tables{number}")
        tables = Tables(channel, in_step=staleness == 0)
        self._tables[tables] = number
        return tables

    def tell(self, model: int, engine: Engine, staleness: int | None) -> Tell:
        """Give servers the parameters of a model, and return the way to tell them of each verb."""
        tell = partial(self._tell, model)
        for number, transfer in enumerate(self._models[model]):
            parameters = set(transfer.parameters)
            tell(partial(values_of, {number: transfer}, parameters))
        if staleness == 0:
            return tell
        servers, lanes = range(self._comm.workers, self._comm.size), len(engine.routes.served)
        beside = self._beside.pop(model)
        ahead = RunningAhead(engine, self._models[model], servers, lanes, tell, beside)
        self._ends[model] = ahead.end
        return ahead

    def close_model(self, model: int) -> None:
        """Have the servers forget a model, because its workers go on without them."""
        self._models.pop(model, None)
        self._send(lambda server: Close(model))

    def close_tables(self, tables: Tables) -> None:
        """Have the servers forget a model's tables, which workers have themselves now."""
        number = self._tables.pop(tables)
        tables.end()
        tables.comm.close()
        self._send(lambda server: Close(number))

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
            self._send(lambda server: End())
            self._lane.drain()

    def abandon(self) -> None:
        """Leave orders that are still to be sent: this rank ends for an error."""
        if self._lane is not None:
            self._lane.abandon()

    def close(self) -> None:
        """End the thread that sends."""
        if self._lane is not None:
            self._lane.close()

    def _tell(self, model: int, verb: Verb | PerServer, /) -> None:
        if self._lane is None:
            return
        held = tuple(
            tuple(i for i, p in enumerate(transfer.parameters) if p in transfer.held)
            for transfer in self._models[model]
        )

        def order_for(server: int) -> PartOrder:
            own = verb_for(server, verb)
            # a step says so itself, piece by piece
            return PartOrder(model, None if isinstance(own, MakeStep) else held, own)

        self._send(order_for)

    def _send(self, order: Callable[[int], AnyOrder]) -> None:
        """Send each server its order."""
        if self._lane is None:
            return
        self._lane.check("an order to the servers")
        servers = range(self._comm.workers, self._comm.size)
        # order 2: written as of now. An order that cannot be sent is refused here
        orders = {server: written_order(order(server)) for server in servers}
        self._lane.run(partial(send_orders, orders), "order to servers")


def check_sendable(optimizers: Sequence[Optimizer]) -> None:
    """Raise UsageError for an optimizer that cannot be described to servers."""
    written_order(OpenTables(0, (), tuple(map(form_of, optimizers)), None))
    for optimizer in optimizers:
        groups = [settings(group) for group in optimizer.param_groups]
        written_order(MakeStep(0, Data(groups), Data(None), {}))


def _duplex(comm: Comm, lanes: int, nbytes: int) -> float:
    parts = shares(comm.workers, comm.size - comm.workers)
    return probe_duplex(comm, Direct(), parts, lanes, nbytes)


def ways(
    comm: Comm, model: int, lanes: int, *, idle: bool = False
) -> tuple[list[Comm], list[Comm]]:
    """Channels of a model's served transfers, among all ranks: there, and back.

    `idle` at servers that wait for workers that run ahead: they compute for as long as they like.
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
        For each part that was not closed, how often a worker was given parameters when it was
        ahead of the slowest by how many steps; nothing where workers keep step.

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
        server.obey(order)
        if isinstance(order, End):
            break
    lane.close()
    return server.observed()


def _read(reader: MessageReader[AnyOrder], received: SimpleQueue[AnyOrder], comm: Comm) -> None:
    received.put(receive_order(reader, 0, comm))


@final
class _RunningServer:
    """A server that runs: its part of each model, and the tables of some."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._parts: dict[int, _Part] = {}

    def obey(self, order: AnyOrder) -> None:
        """Obey worker 0."""
        match order:  # order 5
            case PartOrder():
                self._obey_verb(order)
            case OpenModel(part):
                self._parts[part] = self._model(order)
            case OpenTables(part, forms, optimizers, staleness):
                channel = self._comm.channel(f"tables{part}", idle=True)
                self._parts[part] = ServedTables(channel, forms, optimizers, staleness)
            case OpenWeights(part, slices, lanes, staleness):
                channels = weight_ways(self._comm, part, lanes, idle=True)
                self._parts[part] = GeoModel(slices, channels, staleness)
            case Close(part):
                self._end(self._parts.pop(part))
            case Duplex(lanes, nbytes):
                _duplex(self._comm, lanes, nbytes)
            case End():
                self._finish()
            case _:
                assert_never(order)

    def _obey_verb(self, order: PartOrder) -> None:
        # order 6: find the model, and note the parameters that have a gradient at owners
        part = self._parts[order.part]
        if not isinstance(part, InStep | AheadModel):
            raise unasked(order.verb)  # its workers ask by themselves
        if order.held is not None:
            for transfer, numbers in zip(part.transfers, order.held, strict=True):
                transfer.held = {transfer.parameters[number] for number in numbers}
        part.obey(order.verb)

    def _model(self, order: OpenModel) -> InStep | AheadModel:
        comm, staleness = self._comm, order.staleness
        is_ahead = staleness != 0
        transfers = tuple(transfers_of(order.sites, comm, stale=is_ahead))
        updates = [
            {transfer: PieceUpdate(made_of(form), transfer) for transfer in transfers}
            for form in order.optimizers
        ]
        there, back = ways(comm, order.part, order.lanes, idle=is_ahead)
        if not is_ahead:
            return InStep(transfers, updates, there, back)
        beside = comm.channel(_BESIDE.format(order.part), idle=True)
        return AheadModel(transfers, updates, there, back, beside, staleness)

    def check(self) -> None:
        """Raise the error of a thread that has ended with one."""
        for part in self._parts.values():
            part.check()

    def observed(self) -> list[Counter[int]]:
        """Count, for each part, by how many steps workers were ahead."""
        return [part.observed() for part in self._parts.values()]

    def _finish(self) -> None:
        """Finish everything that workers wait for, and end."""
        for part in self._parts.values():
            self._end(part)

    def _end(self, part: _Part) -> None:
        part.finish(self.check)
        part.close()
