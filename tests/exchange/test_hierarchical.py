"""Hierarchical: `direct` where no host is shared; no slice twice over a link that ranks share."""

from __future__ import annotations

import pytest
import torch
from performed import (
    contribution,
    distinct,
    perform,
    same_bits,
)
from torch import Tensor

from shoal.contracts.exchange import Bucket
from shoal.core.facts import Topology
from shoal.exchange.direct import Direct
from shoal.exchange.hierarchical import Hierarchical

pytestmark = pytest.mark.quick


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
