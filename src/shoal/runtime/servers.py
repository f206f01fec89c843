"""Servers: ranks that own parameters and train nothing, and how they are told what to do.

    worker 0                          every server
    what each worker does next   ──▶  does its part of it, in the same order, over the same lanes
    tell(what, …)                     serve(): _Model.do(what, …)

A server holds the same transfers, updates and lanes as a worker, without the model: it sums,
updates and sends its slices whenever the workers do. Of its tensors it touches its own slices only,
and memory that nobody touches is never taken. What workers and servers both know (parameters,
pieces, transfers) crosses by name, not by value. Guarded by tests/equivalence/test_servers.py.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the
split in which workers serve a share too: Jiang et al., "A Unified Architecture for Accelerating
Distributed DNN Training in Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.tables import Tables
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.buckets import Buckets
from shoal.core.pieces import Piece
from shoal.core.placement import Owner
from shoal.core.registry import named
from shoal.exchange.direct import Direct
from shoal.profiling.paces import probe_duplex
from shoal.profiling.updates import attributes, made
from shoal.runtime.ahead import AheadModel, RunningAhead
from shoal.runtime.engine import Engine
from shoal.runtime.lanes import Lane
from shoal.runtime.optimizer import Given, Update
from shoal.runtime.orders import Names, OfRank, of_rank, read, receive_order, send_orders
from shoal.runtime.owners import Owners, Tell, values_of
from shoal.runtime.tables import ServedTables, TableForm
from shoal.strategies.server import shares

_CHANNEL = "orders"
_END = "end"


@dataclass(frozen=True)
class ServedSite:
    """A site in which servers take part, and the shape, strides and type of its parameters."""

    strategy: str
    exchange: str
    label: str
    parameters: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    owners: Mapping[str, Owner]  # of those that are owned whole
    spans: Mapping[str, tuple[int, int]]  # of those of which it has a part


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
        self._names = Names()
        self._ended = False
        self._models: list[tuple[OwnedTransfer, ...]] = []
        self._running_ahead: list[RunningAhead] = []
        self._tables: list[Tables] = []

    def duplex(self, lanes: int, nbytes: int) -> float:
        """What each direction of the links keeps of its rate while both are in use (a collective of
        all ranks).

        Args:
            lanes: how many buckets go, and come, at once.
            nbytes: of a bucket, the same on every rank.
        """
        self._send("duplex", lanes, nbytes)
        return _duplex(self._comm, lanes, nbytes)

    def open(
        self,
        sites: Sequence[ServedSite],
        transfers: Sequence[OwnedTransfer],
        optimizers: Sequence[Optimizer],
        lanes: int,
        staleness: int | None,
    ) -> tuple[int, list[Comm], list[Comm]]:
        """Let servers take their part of a model (a collective of all ranks): its number, and the
        ways there and back.

        Args:
            sites: what servers take part in.
            transfers: the workers' own side of it, in the same order.
            optimizers: what updates the parameters.
            lanes: how many exchanges are in flight at once.
            staleness: how many steps a worker may run ahead; None: any number.
        """
        model = len(self._models)
        self._models.append(tuple(transfers))
        self._send(
            "open",
            model,
            sites,
            [(type(each), attributes(each)) for each in optimizers],
            lanes,
            staleness,
        )
        self._names.add(model, transfers)
        return model, *ways(self._comm, model, lanes, staleness)

    def open_tables(
        self, forms: Sequence[TableForm], optimizers: Sequence[Optimizer], staleness: int | None
    ) -> Tables:
        """Have the servers make tables of these forms, of zeros (a collective of all ranks); the
        way to them.
        """
        self._send(
            "tables", forms, [(type(each), attributes(each)) for each in optimizers], staleness
        )
        channel = self._comm.channel(f"tables{len(self._tables)}", idle=staleness != 0)
        self._tables.append(Tables(channel, in_step=staleness == 0))
        return self._tables[-1]

    def tell(self, model: int, engine: Engine, staleness: int | None) -> Tell:
        """How to tell the servers of a model what its workers do; they are given the parameters as
        they are.
        """
        tell = partial(self._tell, model)
        for transfer in self._models[model]:
            tell("take_values", OfRank(partial(values_of, [transfer], set(transfer.parameters))))
        if staleness == 0:
            return tell
        servers, lanes = range(self._comm.workers, self._comm.size), len(engine.served_lanes)
        ahead = RunningAhead(engine, self._models[model], servers, lanes, tell, self._names.written)
        self._running_ahead.append(ahead)
        return ahead

    def end(self) -> None:
        """Let the servers finish, and end. Nothing more can be told them."""
        if self._ended:
            return
        self._ended = True
        for ahead in self._running_ahead:
            ahead.end()
        for tables in self._tables:
            tables.end()
        if self._lane is not None:
            self._send(_END)
            self._lane.drain()

    def abandon(self) -> None:
        """Leave what is still to be sent: this rank ends for an error."""
        if self._lane is not None:
            self._lane.abandon()

    def close(self) -> None:
        """End the thread that sends."""
        if self._lane is not None:
            self._lane.close()

    def _tell(self, model: int, what: str, /, *args: Any) -> None:
        held = None  # an update says so itself, piece by piece
        if what != "update":
            held = [
                [i for i, p in enumerate(each.parameters) if p in each.held]
                for each in self._models[model]
            ]
        self._send(what, model, held, *args)

    def _send(self, what: str, /, *args: Any) -> None:
        if self._lane is None:
            return
        self._lane.check("an order to the servers")
        servers = range(self._comm.workers, self._comm.size)
        # as of now; refusals are said here
        orders = {s: self._names.written(what, *of_rank(s, args)) for s in servers}
        self._lane.run(partial(send_orders, orders), f"order to servers: {what}")


def _duplex(comm: Comm, lanes: int, nbytes: int) -> float:
    return probe_duplex(
        comm, Direct(), shares(comm.workers, comm.size - comm.workers), lanes, nbytes
    )


def ways(
    comm: Comm, model: int, lanes: int, staleness: int | None
) -> tuple[list[Comm], list[Comm]]:
    """Channels of a model's served transfers, among all ranks: there, and back."""
    there, back = (
        [comm.channel(f"model{model}-{way}{i}", idle=staleness != 0) for i in range(lanes)]
        for way in ("there", "back")
    )
    return there, back


def serve(comm: Comm) -> list[Counter[int]]:
    """Be a server until the workers have ended.

    Args:
        comm: all ranks, of which this is one of the last.

    Returns:
        For each model, and all tables of one, how often a worker was given parameters when it was
        ahead of the slowest by how many steps; nothing where workers keep step.

    Raises:
        WorldError: a rank was lost.
    """
    orders = Lane(comm.channel(_CHANNEL, idle=True), "orders")
    models: list[_Model] = []
    tables: list[ServedTables] = []
    # after an error nothing is closed: threads may wait for messages that will not come
    while True:
        landed: SimpleQueue[Tensor] = SimpleQueue()
        errand = orders.run(partial(_next_order, landed), "orders")
        errand.wait("serving", meanwhile=partial(_check, models, tables))
        what, *args = read(landed.get(), [model.transfers for model in models])
        if what == _END:
            break
        if what == "open":
            models.append(_Model(comm, *args))
        elif what == "duplex":
            _duplex(comm, *args)
        elif what == "tables":
            tables.append(ServedTables(comm.channel(f"tables{len(tables)}", idle=True), *args))
        else:
            model, held, *args = args
            models[model].do(what, held, *args)
    parts = [*(model.way for model in models), *tables]
    for each in parts:
        each.finish(partial(_check, models, tables))
        each.close()
    orders.close()
    return [each.observed() for each in parts]


def _next_order(landed: SimpleQueue[Tensor], comm: Comm) -> None:
    landed.put(receive_order(0, comm))


def _check(models: Sequence[_Model], tables: Sequence[ServedTables]) -> None:
    for each in (*(model.way for model in models), *tables):
        each.check()


class _Model:
    """A server's part of one model."""

    def __init__(
        self,
        comm: Comm,
        number: int,
        sites: Sequence[ServedSite],
        optimizers: Sequence[tuple[type[Optimizer], Mapping[str, Any]]],
        lanes: int,
        staleness: int | None,
    ) -> None:
        transfers: list[OwnedTransfer] = []
        forms = {name: form for site in sites for name, form in site.parameters.items()}
        shells = {name: _shell(*form) for name, form in forms.items()}
        for site in sites:
            place = Place(
                layers={},
                parameters={name: shells[name] for name in site.parameters},
                spans=site.spans,
                rank=comm.rank,
                ranks=comm.workers,
                servers=comm.size - comm.workers,
                stale=staleness != 0,
                buckets=Buckets("low"),
                owners=site.owners,
            )
            strategy, exchange = (
                named(Strategy, site.strategy),
                named(Exchange, site.exchange),
            )
            made_here = strategy.apply(place, exchange, site.label)
            transfers += [transfer for transfer in made_here if isinstance(transfer, OwnedTransfer)]
        self.transfers = tuple(transfers)
        self._updates = [{t: Update(made(*each), t) for t in transfers} for each in optimizers]
        there, back = ways(comm, number, lanes, staleness)
        self.way: _InStep | AheadModel
        if staleness == 0:
            self.way = _InStep(self.transfers, self._updates, there, back)
        else:
            self.way = AheadModel(self.transfers, number, self._updates, there, back, staleness)

    def do(self, what: str, held: Sequence[Sequence[int]] | None, *args: Any) -> None:
        """Do this server's part of what the workers do; `held`, where it matters: the gradients
        that owners have.
        """
        if held is not None:
            for transfer, indices in zip(self.transfers, held, strict=True):
                transfer.held = {transfer.parameters[i] for i in indices}
        parts: dict[str, Callable[..., object]] = {
            "take_values": self._take_values,
            "take_state": self._take_state,
        }
        (parts | self.way.parts)[what](*args)

    def _take_values(self, values: Mapping[Piece, Tensor]) -> None:
        self.way.settle()
        for piece, value in values.items():
            piece.of(piece.parameter).copy_(value)

    def _take_state(self, optimizer: int, states: Sequence[Mapping[Piece, dict[str, Any]]]) -> None:
        self.way.settle()
        for update, state in zip(self._updates[optimizer].values(), states, strict=True):
            update.take_state(state)


class _InStep:
    """A server's part of a model whose workers keep step: whatever they do together, it does with
    them.
    """

    def __init__(
        self,
        transfers: Sequence[OwnedTransfer],
        updates: Sequence[Mapping[OwnedTransfer, Update]],
        there: Sequence[Comm],
        back: Sequence[Comm],
    ) -> None:
        self._transfers, self._updates = transfers, updates
        self._engine = Engine(transfers, (), there, back)
        self._owners = owners = Owners(self._engine, transfers, there[0].rank)
        self.parts: dict[str, Callable[..., object]] = {
            "exchange": self._exchange,
            "update": self._update,
            "gather_state": self._gather_state,
            "fetch_all": owners.fetch_all,
            "norms": owners.norms,
            "scale": owners.scale,
        }
        self.settle, self.check, self.close = owners.settle, self._engine.check, self._engine.close

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Finish what workers wait for."""
        self.settle()

    def observed(self) -> Counter[int]:
        """Nobody runs ahead."""
        return Counter()

    def _exchange(self) -> None:
        for transfer in self._transfers:
            self._engine.settle(transfer)
            transfer.follow(set(transfer.held))
            self._engine.exchange(transfer)

    def _update(
        self, optimizer: int, given: Mapping[OwnedTransfer, Mapping[Piece, Given]], *settings: Any
    ) -> None:
        for transfer, its in given.items():
            self._owners.send_off(
                transfer, (), self._updates[optimizer][transfer].work(its, *settings)
            )

    def _gather_state(self, optimizer: int) -> None:
        self.settle()
        for transfer, update in self._updates[optimizer].items():
            self._owners.together(transfer, partial(update.gather_state, None))


def _shell(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of that form, of which only what is written takes memory."""
    return nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype))
