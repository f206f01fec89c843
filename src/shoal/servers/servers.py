"""Servers: ranks that own parameters and train nothing, and how they are told what to do.

    worker 0                                   every server
      2  `Servers._send`  writes an order  ──▶ 4  `serve`        reads it, and has it done
                                               6  `_Server`      finds the model it is for
                                               7  `_InStep`      does its part of it, over the
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.codecs.coded import exchange_named
from shoal.codecs.remembering import coded_carriers
from shoal.contracts.comm import Comm
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.buckets import Buckets
from shoal.core.registry import named
from shoal.engine.engine import Engine
from shoal.engine.lanes import Lane
from shoal.exchange.direct import Direct
from shoal.optim.owners import Owners, put_values, values_of
from shoal.optim.residuals import sum_residuals
from shoal.optim.update import Update, put_states
from shoal.profiling.paces import probe_duplex
from shoal.profiling.updates import form_of, made_of, settings
from shoal.remote.orders import (
    AnyModelOrder,
    AnyOrder,
    CloseModel,
    CloseTables,
    Duplex,
    End,
    Numbers,
    OfRank,
    OpenModel,
    OpenTables,
    Order,
    OwnersRole,
    ParameterForm,
    Residuals,
    ServedSite,
    TableForm,
    Tell,
    ToModel,
    UpdatePieces,
    Values,
    order_for,
    receive_order,
    send_orders,
    written_order,
)
from shoal.remote.tables import Tables
from shoal.remote.wire import Data, Reader
from shoal.servers.ahead import AheadModel, RunningAhead
from shoal.servers.tables import ServedTables
from shoal.strategies.server import shares

_CHANNEL, _BESIDE = "orders", "model{}-beside"


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
        self._running_ahead: list[RunningAhead] = []
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
        self._running_ahead.append(ahead)
        return ahead

    def close_model(self, model: int) -> None:
        """Have the servers forget a model whose workers keep step and go on without them."""
        del self._models[model]
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
        for ahead in self._running_ahead:
            ahead.end()
        for tables in self._tables:
            tables.end()
        if self._lane is not None:
            self._send(lambda server: End())
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

    def _send(self, order: Callable[[int], Order]) -> None:
        """Send each server its order."""
        if self._lane is None:
            return
        self._lane.check("an order to the servers")
        servers = range(self._comm.workers, self._comm.size)
        # 2  as of now: what cannot be sent is refused here
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
    server, reader = _Server(comm), Reader[AnyOrder](AnyOrder)
    # after an error nothing is closed: threads may wait for messages that will not come
    while True:
        received: SimpleQueue[AnyOrder] = SimpleQueue()
        # 4  the lane's thread reads, so that this one sees meanwhile whether a rank was lost
        errand = lane.run(partial(_read, reader, received), "orders")
        errand.wait("serving", meanwhile=server.check)
        order = received.get()
        if isinstance(order, End):
            break
        order.do(server)  # 5
    server.finish()
    lane.close()
    return server.observed()


def _read(reader: Reader[AnyOrder], received: SimpleQueue[AnyOrder], comm: Comm) -> None:
    received.put(receive_order(reader, 0, comm))


@final
class _Server:
    """What a server has: its part of each model, and the tables of some."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._model_numbers, self._table_numbers = count(), count()
        self._models: dict[int, _InStep | AheadModel] = {}
        self._tables: dict[int, ServedTables] = {}

    def measure_duplex(self, lanes: int, nbytes: int) -> None:
        """Measure the links, with all ranks."""
        _duplex(self._comm, lanes, nbytes)

    def open_model(self, order: OpenModel) -> None:
        """Take part in a model."""
        comm, number = self._comm, next(self._model_numbers)
        transfers = tuple(_transfers(order.sites, comm, stale=order.staleness != 0))
        updates = [
            {transfer: Update(made_of(form), transfer) for transfer in transfers}
            for form in order.optimizers
        ]
        there, back = ways(comm, number, order.lanes, idle=order.staleness != 0)
        if order.staleness == 0:
            self._models[number] = _InStep(transfers, updates, there, back)
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

    def close_model(self, number: int) -> None:
        """Forget a model."""
        self._end(self._models.pop(number))

    def close_tables(self, number: int) -> None:
        """Forget the tables of a model."""
        self._end(self._tables.pop(number))

    def do_for_model(self, order: ToModel) -> None:
        """Do something for a model."""
        # 6  the model, and whose gradients owners have
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
    def _parts(self) -> list[_InStep | AheadModel | ServedTables]:
        return [*self._models.values(), *self._tables.values()]

    def _end(self, part: _InStep | AheadModel | ServedTables) -> None:
        part.finish(self.check)
        part.close()


def _transfers(sites: Sequence[ServedSite], comm: Comm, *, stale: bool) -> Iterator[OwnedTransfer]:
    """The transfers that workers have of these sites, of parameters without values."""
    forms = {name: form for site in sites for name, form in site.parameters.items()}
    shells = {name: _shell(form) for name, form in forms.items()}
    for site in sites:
        place = Place(
            layers={},
            parameters={name: shells[name] for name in site.parameters},
            spans=site.spans,
            rank=comm.rank,
            ranks=comm.workers,
            servers=comm.size - comm.workers,
            stale=stale,
            buckets=Buckets("low"),
            owners=site.owners,
        )
        strategy = named(Strategy, site.strategy)
        exchange = exchange_named(site.exchange)
        for transfer in strategy.apply(place, exchange, site.label):
            if isinstance(transfer, OwnedTransfer):
                yield transfer


def _shell(form: ParameterForm) -> nn.Parameter:
    """A parameter of that form, of which only what is written takes memory."""
    return nn.Parameter(torch.empty_strided(form.shape, form.stride, dtype=form.dtype))


@final
class _InStep(OwnersRole):
    """A server's part of a model whose workers keep step: it does with them what they do."""

    def __init__(
        self,
        transfers: Sequence[OwnedTransfer],
        updates: Sequence[Mapping[OwnedTransfer, Update]],
        there: Sequence[Comm],
        back: Sequence[Comm],
    ) -> None:
        self.transfers, self._updates = transfers, updates
        self._engine = Engine(transfers, (), there, back)
        self._owners = Owners(self._engine, transfers, there[0].rank)
        self.check, self.close = self._engine.routes.check, self._engine.close

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Finish what workers wait for."""
        self._owners.settle()

    def observed(self) -> Counter[int]:
        """Nobody runs ahead."""
        return Counter()

    def start(self) -> None:
        """Nothing to begin with."""

    def take_values(self, values: Values) -> None:
        self._owners.settle()
        put_values(self.transfers, values)

    def take_state(self, optimizer: int, states: Sequence[Mapping[int, Data]]) -> None:
        self._owners.settle()
        put_states(self._updates[optimizer], states)

    def exchange(self) -> None:
        for transfer in self.transfers:
            self._engine.routes.settle(transfer)
            transfer.follow(set(transfer.held))
            self._engine.routes.exchange(transfer)

    def update(self, order: UpdatePieces) -> None:
        # 7  on the lanes, behind the sums of this backward
        for number, pieces in order.given.items():
            transfer = self.transfers[number]
            update = self._updates[order.optimizer][transfer]
            updated = {transfer.pieces[piece].parameter for piece in pieces}
            work = update.work(pieces, order.groups.value, order.attributes.value, updated)
            self._owners.send_off(transfer, (), work)

    def gather_state(self, optimizer: int) -> None:
        self._owners.settle()
        for transfer, update in self._updates[optimizer].items():
            gather = partial(update.gather_state, None)
            self._owners.together(transfer, gather, "optimizer.state_dict(): state of")

    def fetch_all(self) -> None:
        self._owners.fetch_all()

    def bound_errors(self, most_error: float) -> None:
        for carrier in coded_carriers(self.transfers):
            carrier.most_error = most_error

    def sum_residuals(self) -> None:
        sum_residuals(self._owners)

    def take_residuals(self, sums: Residuals) -> None:
        self._owners.settle()
        for carrier in coded_carriers(self.transfers):
            carrier.give(self._owners.rank, sums)

    def norms(self, parameters: Numbers, order: float) -> None:
        self._owners.norms(self._named(parameters), order)

    def scale(self, parameters: Numbers, factor: Tensor) -> None:
        self._owners.scale(self._named(parameters), factor)

    def _named(self, numbers: Numbers) -> list[Tensor]:
        return [self.transfers[number].parameters[index] for number, index in numbers]
