"""Orders to servers: worker 0 gives them for all workers (servers/servers.py).

    Duplex                                 measure the links, with all workers
    OpenModel, OpenTables, OpenWeights     have a part: slices of a model, tables, or the weights of
                                           workers that step by themselves
    PartOrder                              obey a verb for one part (verbs.py)
    Close                                  forget a part
    End                                    there is nothing more

Things that workers and servers both know cross by number: a part, its transfers that servers take
part in, the parameters of a transfer, and a server's own pieces of it. An order of an ordinary step
fits into its head, so it is one message of the network (docs/lab/decisions.md). Guarded by
tests/remote/test_orders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.placement import Owner
from shoal.remote import channel
from shoal.remote.optimizers import OptimizerForm
from shoal.remote.verbs import End, MakeStep, PartOrder, Verb
from shoal.remote.wire import Message, MessagePart, MessageReader, Written, written

_HEAD_BYTES = 1 << 12


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
    owners: dict[str, Owner]  # parameters that are owned whole
    spans: dict[str, tuple[int, int]]  # parameters of which the site has a part


class TableForm(MessagePart, frozen=True):
    """A table without values."""

    name: str
    rows: int
    width: int
    dtype: torch.dtype


class Duplex(Message, frozen=True):
    """Measure the share of their rate that links keep while both directions are in use."""

    lanes: int
    nbytes: int


class OpenModel(Message, frozen=True):
    """Take part in a model."""

    part: int  # the number that it gets
    sites: tuple[ServedSite, ...]
    optimizers: tuple[OptimizerForm, ...]
    lanes: int
    staleness: int | None


class OpenTables(Message, frozen=True):
    """Make tables, of zeros."""

    part: int
    tables: tuple[TableForm, ...]
    optimizers: tuple[OptimizerForm, ...]
    staleness: int | None


class OpenWeights(Message, frozen=True):
    """Have these weights, a slice a transfer, of workers that step by themselves."""

    part: int
    slices: tuple[Tensor, ...]
    lanes: int
    staleness: int | None


class Close(Message, frozen=True):
    """Forget a part: its workers go on without servers."""

    part: int


AnyOrder = End | Duplex | OpenModel | OpenTables | OpenWeights | PartOrder | Close
AheadOrder = End | MakeStep  # given by a worker that runs ahead, on a lane of one model
PerServer = Callable[[int], Verb]  # a verb that is another for each server, by rank
# Has the servers obey a verb for one model, with its workers
Tell = Callable[[Verb | PerServer], None]


def verb_for(rank: int, verb: Verb | PerServer) -> Verb:
    """The verb as it is for one server."""
    return verb if isinstance(verb, Message) else verb(rank)


def written_order(order: Message) -> Written:
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
        WorldError: something else came.
    """
    return channel.receive(reader, source, comm, _HEAD_BYTES)
