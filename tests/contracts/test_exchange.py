"""What every exchange promises, held against each one that the registry finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from shoal.comm.faulty import Fault, FaultyComm, RandomDelay
from shoal.comm.threads import ThreadComm, run
from shoal.comm.traced import Counts, TracedComm
from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Bucket, Exchange, SplitExchange
from shoal.core.errors import UsageError
from shoal.core.facts import Topology
from shoal.core.pieces import cut
from shoal.core.registry import of
from shoal.exchange.direct import Direct
from shoal.exchange.hierarchical import Hierarchical
from shoal.exchange.ring import Ring
from shoal.exchange.tree import Tree

RANKS = [1, 2, 3, 4, 5, 8]
SIZES = [0, 1, 7, 1000]
EVERY = [kind() for kind in of(Exchange).values()]
# the default chunk is larger than what is sent here
EVERY += [Ring(chunk_bytes=200), Tree(chunk_bytes=200)]
EXACT = [exchange for exchange in EVERY if exchange.exact]
SPLITTING = [exchange for exchange in EVERY if isinstance(exchange, SplitExchange)]
# a letter is the host of a rank
SHARED = ["aabb", "aaab", "abab", "abc", "aaaa", "abbacab", "aaaabbbbcccc"]


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
    faults: Sequence[Fault] = (),
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
    faults: Sequence[Fault],
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
    return one.numpy().tobytes() == other.numpy().tobytes()


def distinct(ranks: int) -> Topology:
    """Every rank on a host of its own."""
    return Topology(tuple(f"host{rank}" for rank in range(ranks)))


def test_registry_finds_the_exchanges() -> None:
    assert {"allreduce", "direct", "hierarchical", "nothing", "ring", "tree"} <= {
        exchange.name for exchange in EVERY
    }


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_gives_the_sum_with_the_same_bits_on_every_rank(
    exchange: Exchange, ranks: int, numel: int
) -> None:
    outcomes = perform(exchange, ranks, numel)
    scale = sum(contribution(rank, numel, torch.float64).abs() for rank in range(ranks))
    for outcome in outcomes:
        assert ((outcome.after_gather - total(ranks, numel)).abs() <= 1e-12 * scale).all()
        assert same_bits(outcome.after_gather, outcomes[0].after_gather)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_after_reduce_each_rank_holds_its_own_slice_summed(
    exchange: Exchange, ranks: int, numel: int
) -> None:
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


@pytest.mark.parametrize("numel", [0, 3, 1000])
@pytest.mark.parametrize("hosts", SHARED)
@pytest.mark.parametrize("exchange", EVERY, ids=repr)
def test_where_ranks_share_hosts_the_sum_and_the_stated_bytes_are_right(
    exchange: Exchange, hosts: str, numel: int
) -> None:
    ranks, stated = len(hosts), exchange.traffic(Bucket(numel, 8), Topology(tuple(hosts)))
    outcomes = perform(exchange, ranks, numel, hosts=hosts)
    assert stated.sent == tuple(outcome.counts.bytes_sent for outcome in outcomes)
    assert stated.received == tuple(outcome.counts.bytes_received for outcome in outcomes)
    assert (stated.leaving or stated.sent) == tuple(
        outcome.counts.bytes_leaving for outcome in outcomes
    )
    assert (stated.rounds > 0) == any(outcome.counts.messages_sent for outcome in outcomes)
    if exchange.exact:
        scale = sum(contribution(rank, numel, torch.float64).abs() for rank in range(ranks))
        for rank, outcome in enumerate(outcomes):
            assert ((outcome.after_gather - total(ranks, numel)).abs() <= 1e-12 * scale).all()
            assert same_bits(outcome.after_gather, outcomes[0].after_gather)
            assert same_bits(
                cut(outcome.after_reduce, ranks)[rank], cut(outcome.after_gather, ranks)[rank]
            )


@pytest.mark.parametrize("exchange", EXACT, ids=repr)
def test_delays_do_not_change_a_bit(exchange: Exchange) -> None:
    for hosts in ("abcd", "abaa"):
        undisturbed = perform(exchange, 4, 1000, torch.float32, hosts=hosts)[0].after_gather
        for seed in range(3):
            for outcome in perform(
                exchange, 4, 1000, torch.float32, [RandomDelay(0.003, seed)], hosts
            ):
                assert same_bits(outcome.after_gather, undisturbed)


@pytest.mark.parametrize("numel", [3, 1000])
@pytest.mark.parametrize("hosts", ["abcdefgh"[:ranks] for ranks in RANKS] + SHARED)
@pytest.mark.parametrize("exchange", EVERY, ids=repr)
def test_leaves_tensors_in_flight_alone_and_waits_for_all(
    exchange: Exchange, hosts: str, numel: int
) -> None:
    def work(comm: ThreadComm) -> None:
        watchful, flat = WatchfulComm(comm), contribution(comm.rank, numel, torch.float64)
        for half in (exchange.reduce, exchange.gather):
            half(flat, watchful)
            watchful.close()
        assert not flat.isnan().any()

    run(len(hosts), work, timeout_s=20, hosts=hosts)


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


@pytest.mark.parametrize(
    ("workers", "servers", "most"), [(3, 0, 2), (6, 0, 3), (4, 4, 7), (4, 2, 5)]
)
def test_direct_sends_to_few_at_a_time_but_where_there_are_servers(
    workers: int, servers: int, most: int
) -> None:
    """What many senders at once send overruns a receiver's queue; but no server is left without."""

    def work(comm: ThreadComm) -> int:
        watchful = WatchfulComm(comm)
        Direct().reduce_scatter(slices_of(comm.rank, [1] * comm.size), watchful)
        Direct().all_gather(slices_of(comm.rank, [1] * comm.size), watchful)
        return watchful.most_sending

    assert max(run(workers + servers, work, timeout_s=20, servers=servers)) == most


@pytest.mark.parametrize("numel", [1, 1000])
@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (4, 2), (5, 2)])
def test_hierarchical_is_direct_where_no_host_is_shared(
    ranks: int, rounds: int, numel: int
) -> None:
    topology, bucket = distinct(ranks), Bucket(numel, 4)
    stated = Hierarchical().traffic(bucket, topology)
    assert stated == Direct().traffic(bucket, topology)
    assert stated.rounds == rounds
    for one, other in zip(
        perform(Hierarchical(), ranks, numel), perform(Direct(), ranks, numel), strict=True
    ):
        assert same_bits(one.after_gather, other.after_gather)
        assert one.counts == other.counts


@pytest.mark.parametrize(
    ("hosts", "count"), [("aabb", 2), ("abab", 2), ("aaaabbbbcccc", 3), ("aaaa", 1)]
)
def test_hierarchical_sends_nothing_twice_over_a_hosts_link(hosts: str, count: int) -> None:
    numel = 120
    leaving = [
        outcome.counts.bytes_leaving
        for outcome in perform(Hierarchical(), len(hosts), numel, hosts=hosts)
    ]
    for host in set(hosts):
        own = sum(nbytes for nbytes, where in zip(leaving, hosts, strict=True) if where == host)
        assert own == 2 * numel * 8 * (count - 1) // count
    assert Hierarchical().traffic(Bucket(numel, 8), Topology(tuple(hosts))).rounds == (
        4 if count > 1 else 2
    )


@pytest.mark.parametrize("hosts", ["abaab", "aabb", "abbc"])
def test_hierarchical_adds_each_hosts_ranks_in_order_then_the_hosts_in_order(hosts: str) -> None:
    """So that the bits of a gradient do not depend on its place in a bucket, nor on who is
    quick.
    """
    sums: dict[str, Tensor] = {}
    for rank, host in enumerate(hosts):
        own = contribution(rank, 1000, torch.float32)
        sums[host] = sums[host] + own if host in sums else own
    first, *others = sums.values()
    for other in others:
        first = first + other
    for outcome in perform(Hierarchical(), len(hosts), 1000, torch.float32, hosts=hosts):
        assert same_bits(outcome.after_gather, first)


@pytest.mark.parametrize("exchange", SPLITTING, ids=repr)
@pytest.mark.parametrize("hosts", ["ab", "abc", "abcd", "aab", "aabb"])
def test_halves_carry_what_happens_between_them(exchange: Exchange, hosts: str) -> None:
    """An update may run between them: the owner's slice is what comes back, not the bare sum."""
    ranks = len(hosts)

    def work(comm: Comm) -> Tensor:
        flat = contribution(comm.rank, 1000, torch.float64)
        exchange.reduce(flat, comm)
        cut(flat, ranks)[comm.rank].mul_(0.5)
        exchange.gather(flat, comm)
        return flat

    for result in run(ranks, work, timeout_s=20, hosts=hosts):
        torch.testing.assert_close(result, 0.5 * total(ranks, 1000), rtol=1e-10, atol=1e-10)


def slices_of(rank: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """What a rank contributes, cut into slices of these sizes."""
    return contribution(rank, sum(sizes), torch.float64).split(list(sizes))


@pytest.mark.parametrize("sizes", [(10, 0, 7), (0, 0, 5), (1, 2, 3, 40), (0, 9, 0, 4)])
@pytest.mark.parametrize("exchange", SPLITTING, ids=repr)
def test_slices_may_have_any_sizes(exchange: SplitExchange, sizes: tuple[int, ...]) -> None:
    ranks = len(sizes)

    def work(comm: Comm) -> tuple[Tensor, Counts]:
        traced, slices = TracedComm(comm), slices_of(comm.rank, sizes)
        exchange.reduce_scatter(slices, traced)
        slices[comm.rank].mul_(0.5)
        exchange.all_gather(slices, traced)
        return torch.cat(slices), traced.counts

    stated = exchange.traffic(Bucket(sum(sizes), 8, sizes), distinct(ranks))
    for rank, (result, counts) in enumerate(run(ranks, work, timeout_s=20)):
        torch.testing.assert_close(result, 0.5 * total(ranks, sum(sizes)), rtol=1e-10, atol=1e-10)
        assert (counts.bytes_sent, counts.bytes_received) == (
            stated.sent[rank],
            stated.received[rank],
        )


@pytest.mark.parametrize("sizes", [(0, 0, 8, 8), (3, 3, 10), (5, 0, 12), (2, 2, 2, 2, 9, 9)])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("exchange", [each for each in SPLITTING if each.serves], ids=repr)
def test_servers_sum_what_workers_bring_and_are_brought_nothing(
    exchange: SplitExchange, sizes: tuple[int, ...], servers: int
) -> None:
    ranks = len(sizes)
    workers = ranks - servers

    def work(comm: Comm) -> tuple[tuple[Tensor, ...], Counts]:
        traced, slices = TracedComm(comm), slices_of(comm.rank, sizes)
        exchange.reduce_scatter(slices, traced)
        own = slices[comm.rank].clone()
        exchange.all_gather(slices, traced)
        return (own, *slices), traced.counts

    bucket, topology = (
        Bucket(sum(sizes), 8, sizes),
        Topology(tuple(map(str, range(ranks))), servers),
    )
    stated = exchange.traffic(bucket, topology)
    expected = total(workers, sum(sizes)).split(list(sizes))
    for rank, ((own, *slices), counts) in enumerate(
        run(ranks, work, timeout_s=20, servers=servers)
    ):
        assert same_bits(own, expected[rank])
        if rank < workers:
            assert all(map(same_bits, slices, expected))
        assert (counts.bytes_sent, counts.bytes_received) == (
            stated.sent[rank],
            stated.received[rank],
        )


@pytest.mark.parametrize("exchange", SPLITTING, ids=repr)
def test_empty_slices_are_not_sent(exchange: Exchange) -> None:
    """One element among five ranks has one owner: it gets four contributions or partial sums and
    sends the sum on.
    """
    messages = [outcome.counts.messages_sent for outcome in perform(exchange, 5, 1)]
    assert sum(messages) == 8


@pytest.mark.parametrize(
    ("ranks", "busiest"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3), (7, 3), (8, 3)]
)
def test_the_busiest_rank_of_a_tree(ranks: int, busiest: int) -> None:
    assert Tree().traffic(Bucket(1000, 4), distinct(ranks)).worst == busiest * 4000


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 11), (3, 11), (4, 13), (7, 13), (8, 15)])
def test_rounds_of_a_tree_are_its_levels_and_its_chunks(ranks: int, rounds: int) -> None:
    assert Tree(chunk_bytes=400).traffic(Bucket(1000, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 10), (3, 10), (4, 10)])
def test_rounds_of_a_ring_are_its_steps_and_its_further_chunks(ranks: int, rounds: int) -> None:
    assert Ring(chunk_bytes=200).traffic(Bucket(500, 4), distinct(ranks)).rounds == rounds


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [Ring, Tree])
def test_the_size_of_a_chunk_does_not_change_a_bit(kind: type[Ring | Tree], ranks: int) -> None:
    whole, chunked = (
        perform(kind(chunk_bytes=size), ranks, 1000, torch.float32) for size in (1 << 20, 100)
    )
    assert same_bits(whole[0].after_gather, chunked[0].after_gather)
    assert ranks == 1 or chunked[0].counts.messages_sent > whole[0].counts.messages_sent


@pytest.mark.parametrize("kind", [Ring, Tree])
def test_no_chunks_are_refused(kind: type[Ring | Tree]) -> None:
    with pytest.raises(UsageError, match="chunk_bytes"):
        kind(chunk_bytes=0)
