"""What every exchange promises, held against each one that the registry finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import shoal.exchange
from shoal.comm.faulty import Fault, FaultyComm, RandomDelay
from shoal.comm.threads import ThreadComm, run
from shoal.comm.traced import Counts, TracedComm
from shoal.core.contracts import Bucket, Comm, Exchange, Pending
from shoal.core.errors import UsageError
from shoal.core.facts import Topology
from shoal.core.pieces import cut
from shoal.core.registry import found
from shoal.exchange.direct import Direct
from shoal.exchange.ring import Ring
from shoal.exchange.tree import Tree

RANKS = [1, 2, 3, 4, 5, 8]
SIZES = [0, 1, 3, 7, 1000, 4097]
EVERY = [kind() for kind in found(shoal.exchange, Exchange).values()]
EVERY += [Ring(chunk_bytes=200), Tree(chunk_bytes=200)]  # the default chunk is larger than what is sent here
EXACT = [exchange for exchange in EVERY if exchange.exact]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    after_reduce: Tensor
    after_gather: Tensor
    counts: Counts


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings: values of several magnitudes, so that a sum in another order has other bits."""
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
    exchange: Exchange, ranks: int, numel: int, dtype: torch.dtype = torch.float64, faults: Sequence[Fault] = ()
) -> list[Outcome]:
    """Reduce and gather on every rank, counted."""

    def work(comm: ThreadComm) -> Outcome:
        traced = TracedComm(FaultyComm(comm, faults) if faults else comm)
        flat = contribution(comm.rank, numel, dtype)
        exchange.reduce(flat, traced)
        after_reduce = flat.clone()
        exchange.gather(flat, traced)
        return Outcome(after_reduce, flat, traced.counts)

    return run(ranks, work, timeout_s=20)


class WatchfulComm(Comm):
    """Holds an exchange to what a real network asks, where a ThreadComm, which copies, would let it pass.

    What is being sent must not change, what is being received into must not be touched, and all must be waited for.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.sending: list[Watched] = []
        self.receiving: list[Watched] = []

    def send(self, tensor: Tensor, to: int) -> Pending:
        assert not any(overlap(tensor, other.tensor) for other in self.receiving), "sent before it has landed"
        self.sending.append(Watched(self.inner.send(tensor, to), tensor, tensor.clone(), self.sending))
        return self.sending[-1]

    def receive(self, tensor: Tensor, source: int) -> Pending:
        assert not any(overlap(tensor, o.tensor) for o in self.receiving + self.sending), "received into what is in use"
        tensor.fill_(torch.nan)  # seen if it is read too early
        self.receiving.append(Watched(self.inner.receive(tensor, source), tensor, tensor.clone(), self.receiving))
        return self.receiving[-1]

    def channel(self, name: str) -> Comm:
        raise AssertionError("an exchange is given its channel")

    def gather_objects(self, value: object) -> list[object]:
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
    return bytes(one.view(torch.uint8).tolist()) == bytes(other.view(torch.uint8).tolist())


def distinct(ranks: int) -> Topology:
    """Every rank on a host of its own."""
    return Topology(tuple(f"host{rank}" for rank in range(ranks)))


def test_registry_finds_the_exchanges() -> None:
    assert {"allreduce", "direct", "nothing", "ring", "tree"} <= {exchange.name for exchange in EVERY}


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_gives_the_sum_with_the_same_bits_on_every_rank(exchange: Exchange, ranks: int, numel: int) -> None:
    outcomes = perform(exchange, ranks, numel)
    scale = sum(contribution(rank, numel, torch.float64).abs() for rank in range(ranks))
    for outcome in outcomes:
        assert ((outcome.after_gather - total(ranks, numel)).abs() <= 1e-12 * scale).all()
        assert same_bits(outcome.after_gather, outcomes[0].after_gather)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_after_reduce_each_rank_holds_its_own_slice_summed(exchange: Exchange, ranks: int, numel: int) -> None:
    for rank, outcome in enumerate(perform(exchange, ranks, numel)):
        own, final = cut(outcome.after_reduce, ranks)[rank], cut(outcome.after_gather, ranks)[rank]
        assert same_bits(own, final)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EVERY, ids=repr)
def test_stated_bytes_are_the_bytes_counted(exchange: Exchange, ranks: int, numel: int) -> None:
    for dtype in (torch.float64, torch.float32):
        stated = exchange.traffic(Bucket(numel, dtype.itemsize), distinct(ranks))
        counts = [outcome.counts for outcome in perform(exchange, ranks, numel, dtype)]
        assert stated.sent == tuple(c.bytes_sent for c in counts)
        assert stated.received == tuple(c.bytes_received for c in counts)
        assert (stated.rounds > 0) == any(c.messages_sent for c in counts)


@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_delays_do_not_change_a_bit(exchange: Exchange) -> None:
    undisturbed = perform(exchange, 4, 1000, torch.float32)[0].after_gather
    for seed in range(3):
        for outcome in perform(exchange, 4, 1000, torch.float32, [RandomDelay(0.003, seed)]):
            assert same_bits(outcome.after_gather, undisturbed)


@pytest.mark.parametrize("numel", [1, 3, 1000])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EVERY, ids=repr)
def test_leaves_tensors_in_flight_alone_and_waits_for_all(exchange: Exchange, ranks: int, numel: int) -> None:
    def work(comm: ThreadComm) -> None:
        watchful, flat = WatchfulComm(comm), contribution(comm.rank, numel, torch.float64)
        for half in (exchange.reduce, exchange.gather):
            half(flat, watchful)
            watchful.close()
        assert not flat.isnan().any()

    run(ranks, work, timeout_s=20)


def test_nothing_leaves_each_rank_its_own() -> None:
    (nothing,) = (exchange for exchange in EVERY if exchange.name == "nothing")
    assert not nothing.exact
    for rank, outcome in enumerate(perform(nothing, 3, 1000)):
        assert same_bits(outcome.after_gather, contribution(rank, 1000, torch.float64))


@pytest.mark.parametrize("ranks", RANKS)
def test_direct_adds_in_the_order_of_the_ranks(ranks: int) -> None:
    """So that the bits of a gradient do not depend on its place in a bucket."""
    expected = total(ranks, 1000, torch.float32)
    for outcome in perform(Direct(), ranks, 1000, torch.float32):
        assert same_bits(outcome.after_gather, expected)


@pytest.mark.parametrize("exchange", [Direct(), Ring()], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_halves_carry_what_happens_between_them(exchange: Exchange, ranks: int) -> None:
    """An update may run between them: the owner's slice is what comes back, not the bare sum."""

    def work(comm: Comm) -> Tensor:
        flat = contribution(comm.rank, 1000, torch.float64)
        exchange.reduce(flat, comm)
        cut(flat, ranks)[comm.rank].mul_(0.5)
        exchange.gather(flat, comm)
        return flat

    for result in run(ranks, work, timeout_s=20):
        torch.testing.assert_close(result, 0.5 * total(ranks, 1000), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exchange", [Direct(), Ring()], ids=repr)
def test_empty_slices_are_not_sent(exchange: Exchange) -> None:
    """One element among five ranks has one owner: it gets four contributions or partial sums and sends the sum on."""
    messages = [outcome.counts.messages_sent for outcome in perform(exchange, 5, 1)]
    assert sum(messages) == 8


@pytest.mark.parametrize(("ranks", "busiest"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)])
def test_the_busiest_rank_of_a_tree(ranks: int, busiest: int) -> None:
    assert Tree().traffic(Bucket(1000, 4), distinct(ranks)).worst == busiest * 4000


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 11), (3, 11), (4, 13), (7, 13), (8, 15)])
def test_rounds_of_a_tree_are_its_levels_and_its_chunks(ranks: int, rounds: int) -> None:
    assert Tree(chunk_bytes=400).traffic(Bucket(1000, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 10), (3, 16), (4, 18)])
def test_rounds_of_a_ring_are_its_steps_times_its_chunks(ranks: int, rounds: int) -> None:
    assert Ring(chunk_bytes=200).traffic(Bucket(500, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [Ring, Tree])
def test_the_size_of_a_chunk_does_not_change_a_bit(kind: type[Ring | Tree], ranks: int) -> None:
    whole, chunked = (perform(kind(chunk_bytes=size), ranks, 1000, torch.float32) for size in (1 << 20, 100))
    assert same_bits(whole[0].after_gather, chunked[0].after_gather)
    assert ranks == 1 or chunked[0].counts.messages_sent > whole[0].counts.messages_sent


@pytest.mark.parametrize("kind", [Ring, Tree])
def test_no_chunks_are_refused(kind: type[Ring | Tree]) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        kind(chunk_bytes=0)
