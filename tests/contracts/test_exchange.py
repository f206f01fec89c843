"""What every exchange promises, held against each one that the registry finds."""

from __future__ import annotations

import pytest
import torch
from performed import (
    RANKS,
    WatchfulComm,
    contribution,
    distinct,
    perform,
    same_bits,
    slices_of,
    total,
)
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange, SplitExchange
from shoal.core.facts import Topology
from shoal.core.pieces import cut
from shoal.core.registry import of
from shoal.exchange.ring import Ring
from shoal.exchange.tree import Tree
from shoal_tools.testing.byte_counts import Counts, TracedComm
from shoal_tools.testing.planned_faults import RandomDelay

pytestmark = pytest.mark.quick

SIZES = [0, 1, 7, 1000]
EVERY = [kind() for kind in of(Exchange).values()]
# the default chunk is larger than what is sent here
EVERY += [Ring(chunk_bytes=200), Tree(chunk_bytes=200)]
EXACT = [exchange for exchange in EVERY if exchange.exact]
SPLITTING = [exchange for exchange in EVERY if isinstance(exchange, SplitExchange)]
# a letter is the host of a rank
SHARED = ["aabb", "aaab", "abab", "abc", "aaaa", "abbacab", "aaaabbbbcccc"]


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
