"""Performs an exchange on threads, says what each rank saw, and watches what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Exchange
from shoal.core.facts import Topology
from shoal_tools.testing.byte_counts import Counts, TracedComm
from shoal_tools.testing.planned_faults import FaultyComm, NetworkFault

RANKS = [1, 2, 3, 4, 5, 8]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    after_reduce: Tensor
    after_gather: Tensor
    counts: Counts


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings: values of several magnitudes, so that a sum in another order has other
    bits.
    """
    random = torch.Generator().manual_seed(1000 * numel + rank)
    values = torch.randn(numel, generator=random, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-3, 4, (numel,), generator=random)).to(dtype)


def total(ranks: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The sum, added in the order of the ranks."""
    result = contribution(0, numel, dtype)
    for rank in range(1, ranks):
        result += contribution(rank, numel, dtype)
    return result


def perform(
    exchange: Exchange,
    ranks: int,
    numel: int,
    dtype: torch.dtype = torch.float64,
    faults: Sequence[NetworkFault] = (),
    hosts: str | None = None,
) -> list[Outcome]:
    """Reduce and gather on every rank, counted; every rank on a host of its own, or on the one that
    a letter names.

    What it gives is not to be changed: several tests look at one run.
    """
    if not faults:
        return undisturbed(exchange, ranks, numel, dtype, hosts)
    return performed(exchange, ranks, numel, dtype, faults, hosts)


def performed(
    exchange: Exchange,
    ranks: int,
    numel: int,
    dtype: torch.dtype,
    faults: Sequence[NetworkFault],
    hosts: str | None,
) -> list[Outcome]:
    def work(comm: ThreadComm) -> Outcome:
        traced = TracedComm(FaultyComm(comm, faults) if faults else comm)
        flat = contribution(comm.rank, numel, dtype)
        exchange.reduce(flat, traced)
        after_reduce = flat.clone()
        exchange.gather(flat, traced)
        return Outcome(after_reduce, flat, traced.counts)

    return run(ranks, work, timeout_s=20, hosts=hosts)


@cache
def undisturbed(
    exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype, hosts: str | None
) -> list[Outcome]:
    return performed(exchange, ranks, numel, dtype, (), hosts)


class WatchfulComm(Comm):
    """Holds an exchange to what a real network asks, where a ThreadComm, which copies, would let it
    pass.

    What is being sent must not change, what is being received into must not be touched, and all
    must be waited for.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner, self.rank, self.size, self.topology = (
            inner,
            inner.rank,
            inner.size,
            inner.topology,
        )
        self.sending: list[Watched] = []
        self.receiving: list[Watched] = []
        self.most_sending = 0

    def send(self, tensor: Tensor, to: int) -> Pending:
        assert not any(overlap(tensor, other.tensor) for other in self.receiving), (
            "sent before it has landed"
        )
        self.sending.append(
            Watched(self.inner.send(tensor, to), tensor, tensor.clone(), self.sending)
        )
        self.most_sending = max(self.most_sending, len(self.sending))
        return self.sending[-1]

    def receive(self, tensor: Tensor, source: int) -> Pending:
        assert not any(overlap(tensor, o.tensor) for o in self.receiving + self.sending), (
            "received into what is in use"
        )
        tensor.fill_(torch.nan)  # seen if it is read too early
        self.receiving.append(
            Watched(self.inner.receive(tensor, source), tensor, tensor.clone(), self.receiving)
        )
        return self.receiving[-1]

    def channel(self, name: str, *, idle: bool = False) -> Comm:
        raise AssertionError("an exchange is given its channel")

    def group(self, ranks: int) -> Comm:
        raise AssertionError("an exchange is given its channel")

    def gather_objects(self, value: object, purpose: str, *kinds: type) -> list[object]:
        raise AssertionError("an exchange moves tensors")

    def close(self) -> None:
        assert not self.sending, "a send was not waited for"
        assert not self.receiving, "a receive was not waited for"


@dataclass(eq=False)
class Watched:
    """A message in flight, and what its tensor held when it was posted."""

    pending: Pending
    tensor: Tensor
    before: Tensor
    in_flight: list[Watched]

    def wait(self) -> None:
        assert same_bits(self.tensor, self.before), "changed while in flight"
        self.pending.wait()
        self.in_flight.remove(self)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return (
        one.data_ptr() < other.data_ptr() + other.nbytes
        and other.data_ptr() < one.data_ptr() + one.nbytes
        and min(one.nbytes, other.nbytes) > 0
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit, NaN and signed zero included."""
    return one.numpy().tobytes() == other.numpy().tobytes()


def distinct(ranks: int) -> Topology:
    """Every rank on a host of its own."""
    return Topology(tuple(f"host{rank}" for rank in range(ranks)))


def slices_of(rank: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """What a rank contributes, cut into slices of these sizes."""
    return contribution(rank, sum(sizes), torch.float64).split(list(sizes))
