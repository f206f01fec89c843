"""Servers: ranks that own parameters and train nothing, and how they are told what to do.

    worker 0                          every server
    what each worker does next   ──▶  does its part of it, in the same order, over the same lanes
    Servers.tell(what, …)             serve(): _Model.<what>(…)

A server holds the same transfers, updates and lanes as a worker, without the model: it sums, updates and sends its
slices whenever the workers do. Of its tensors it touches its own slices only, and memory that nobody touches is never
taken. What workers and servers both know (parameters, pieces, transfers) crosses by name, not by value.
Guarded by tests/equivalence/test_servers.py.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the split in which
workers serve a share too: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal import exchange as exchanges
from shoal import strategies
from shoal.core.contracts import Comm, Exchange, OwnedTransfer, Place, Strategy
from shoal.core.pieces import Piece
from shoal.core.registry import named
from shoal.profiling.updates import attributes, made
from shoal.runtime.engine import Engine
from shoal.runtime.lanes import Lane
from shoal.runtime.optimizer import Update
from shoal.runtime.owners import OfRank, Owners, Tell

_CHANNEL = "orders"
_END = "end"
_Name = tuple[int, ...]  # model, transfer, and parameter, or rank and piece; () is nothing that a server knows


@dataclass(frozen=True)
class ServedSite:
    """A site in which servers take part, and the shape, strides and type of its parameters."""

    strategy: str
    exchange: str
    label: str
    parameters: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


@final
class Servers:
    """The servers, as workers see them. Every worker has one, and worker 0 speaks for all.

    Args:
        comm: all ranks, servers among them.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.hosts = comm.topology.hosts[comm.workers :]
        orders = comm.channel(_CHANNEL, idle=True)
        self._lane = Lane(orders, "orders") if comm.rank == 0 else None
        self._names: dict[int, _Name] = {}  # by id, of what servers know too
        self._ended = False
        self._models: list[tuple[OwnedTransfer, ...]] = []

    def open(
        self,
        sites: Sequence[ServedSite],
        transfers: Sequence[OwnedTransfer],
        optimizers: Sequence[Optimizer],
        lanes: int,
    ) -> tuple[list[Comm], Tell]:
        """Let servers take their part of a model (a collective of all ranks): the lanes, and how to tell them.

        Args:
            sites: what servers take part in.
            transfers: the workers' own side of it, in the same order.
            optimizers: what updates the parameters.
            lanes: how many exchanges are in flight at once.
        """
        model = len(self._models)
        self._models.append(tuple(transfers))
        self._send("open", model, sites, [(type(each), attributes(each)) for each in optimizers], lanes)
        for number, transfer in enumerate(transfers):
            self._names[id(transfer)] = (model, number)
            self._names |= {id(p): (model, number, index) for index, p in enumerate(transfer.parameters)}
            for rank, pieces in enumerate(transfer.owned):
                self._names |= {id(piece): (model, number, rank, index) for index, piece in enumerate(pieces)}
        tell = partial(self._tell, model)
        tell("take_values", OfRank(lambda rank: [{p: _value(p) for p in each.owned[rank]} for each in transfers]))
        return channels(self.comm, model, lanes), tell

    def end(self) -> None:
        """Let the servers finish, and end. Nothing more can be told them."""
        if self._lane is not None and not self._ended:
            self._ended = True
            self._send(_END)
            self._lane.drain()

    def close(self) -> None:
        """End the thread that sends."""
        if self._lane is not None:
            self._lane.close()

    def _tell(self, model: int, what: str, /, *args: Any) -> None:
        held = [[i for i, p in enumerate(each.parameters) if p in each.held] for each in self._models[model]]
        self._send(what, model, held, *args)

    def _send(self, what: str, /, *args: Any) -> None:
        if self._lane is None:
            return
        for server in range(self.comm.workers, self.comm.size):
            order = self._written((what, *(arg.of(server) if isinstance(arg, OfRank) else arg for arg in args)))
            self._lane.run(partial(_send_bytes, order, server), f"order to rank {server}: {what}")

    def _written(self, order: tuple[Any, ...]) -> Tensor:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = self._name  # type: ignore[method-assign]
        pickler.dump(order)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def _name(self, thing: Any) -> _Name | None:
        if isinstance(thing, nn.Parameter | Piece | OwnedTransfer):
            return self._names.get(id(thing), ())  # a parameter that no server has any part of
        return None


def channels(comm: Comm, model: int, lanes: int) -> list[Comm]:
    """The lanes of a model's served transfers, among all ranks."""
    return [comm.channel(f"model{model}-served{lane}") for lane in range(lanes)]


def serve(comm: Comm) -> None:
    """Be a server until the workers have ended.

    Args:
        comm: all ranks, of which this is one of the last.

    Raises:
        WorldError: a rank was lost.
    """
    orders = Lane(comm.channel(_CHANNEL, idle=True), "orders")
    models: list[_Model] = []
    try:
        while True:
            landed: list[Tensor] = []
            errand = orders.run(partial(_receive_bytes, landed), "orders")
            errand.wait("serving", meanwhile=partial(_check, models))
            what, *args = _read(landed[0], models)
            if what == _END:
                return
            if what == "open":
                models.append(_Model(comm, *args))
            else:
                model, held, *args = args
                models[model].do(what, held, *args)
    finally:
        for model in models:
            model.engine.close()
        orders.close()


def _check(models: Sequence[_Model]) -> None:
    for model in models:
        model.engine.check()


class _Model:
    """A server's part of one model."""

    def __init__(
        self,
        comm: Comm,
        number: int,
        sites: Sequence[ServedSite],
        optimizers: Sequence[tuple[type[Optimizer], Mapping[str, Any]]],
        lanes: int,
    ) -> None:
        transfers: list[OwnedTransfer] = []
        for site in sites:
            shells = {name: _shell(*form) for name, form in site.parameters.items()}
            place = Place({}, shells, comm.rank, comm.workers, comm.size - comm.workers)
            strategy, exchange = named(strategies, Strategy, site.strategy), named(exchanges, Exchange, site.exchange)
            made_here = strategy.apply(place, exchange, site.label)
            transfers += [transfer for transfer in made_here if isinstance(transfer, OwnedTransfer)]
        self.transfers = tuple(transfers)
        self.engine = Engine(transfers, (), channels(comm, number, lanes))
        self.owners = Owners(self.engine, transfers, comm.rank)
        own = (self.exchange, self.update, self.gather_state, self.take_state, self.take_values)
        theirs = (self.owners.fetch_all, self.owners.norms, self.owners.scale)
        self._parts: dict[str, Callable[..., object]] = {part.__name__: part for part in (*own, *theirs)}
        self._updates = [{t: Update(made(*each), t) for t in transfers} for each in optimizers]

    def do(self, what: str, held: Sequence[Sequence[int]], *args: Any) -> None:
        """Do this server's part of what the workers do, who find these gradients held by their owners."""
        for transfer, indices in zip(self.transfers, held, strict=True):
            transfer.held = {transfer.parameters[i] for i in indices}
        self._parts[what](*args)

    def exchange(self) -> None:
        """A backward begins."""
        for transfer in self.transfers:
            self.engine.settle(transfer)
            transfer.follow(set(transfer.held))
            self.engine.later(transfer, transfer.run, "exchange")

    def update(self, optimizer: int, transfer: OwnedTransfer, *work: Any) -> None:
        """A step of one optimizer, for one transfer."""
        self.owners.send_off(transfer, (), self._updates[optimizer][transfer].work(*work))

    def gather_state(self, optimizer: int) -> None:
        """A worker's state_dict."""
        self.owners.settle()
        for transfer, update in self._updates[optimizer].items():
            self.owners.together(transfer, partial(update.gather_state, None))

    def take_state(self, optimizer: int, states: Sequence[Mapping[Piece, dict[str, Any]]]) -> None:
        """A state that workers have loaded, or begin with."""
        self.owners.settle()
        for update, state in zip(self._updates[optimizer].values(), states, strict=True):
            update.take_state(state)

    def take_values(self, values: Sequence[Mapping[Piece, Tensor]]) -> None:
        """What parameters begin with."""
        for pieces in values:
            for piece, value in pieces.items():
                piece.of(piece.parameter).copy_(value)


def _value(piece: Piece) -> Tensor:
    return piece.of(piece.parameter).clone()


def _shell(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of that form, of which only what is written takes memory."""
    return nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype))


def _send_bytes(order: Tensor, to: int, comm: Comm) -> None:
    comm.send(torch.tensor([order.numel()]), to).wait()
    comm.send(order, to).wait()


def _receive_bytes(landed: list[Tensor], comm: Comm) -> None:
    size = torch.empty(1, dtype=torch.int64)
    comm.receive(size, 0).wait()
    order = torch.empty(int(size), dtype=torch.uint8)
    comm.receive(order, 0).wait()
    landed.append(order)


def _read(order: Tensor, models: Sequence[_Model]) -> Any:
    def thing(name: _Name) -> Any:
        if not name:
            return None
        model, number, *rest = name
        transfer = models[model].transfers[number]
        if not rest:
            return transfer
        return transfer.parameters[rest[0]] if len(rest) == 1 else transfer.owned[rest[0]][rest[1]]

    unpickler = pickle.Unpickler(io.BytesIO(order.numpy().tobytes()))
    unpickler.persistent_load = thing  # type: ignore[method-assign]
    return unpickler.load()
