"""Direct: the order in which it adds, and to how many it sends at a time."""

from __future__ import annotations

import pytest
import torch
from performed import (
    RANKS,
    WatchfulComm,
    perform,
    same_bits,
    slices_of,
    total,
)

from shoal.comm.threads import ThreadComm, run
from shoal.exchange.direct import Direct

pytestmark = pytest.mark.quick


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
