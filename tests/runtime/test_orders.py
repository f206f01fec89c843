"""Orders to servers: bytes that arrive as they were sent."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.threads import ThreadComm, run
from shoal.runtime.orders import receive_order, send_orders

HEAD = 1 << 12  # bytes of an order's first message, eight of which say how long the order is


@pytest.mark.parametrize("nbytes", [0, 1, HEAD - 9, HEAD - 8, HEAD - 7, 3 * HEAD])
def test_an_order_arrives_whole(nbytes: int) -> None:
    order = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)

    def work(comm: ThreadComm) -> list[torch.Tensor]:
        if comm.rank == 0:
            for _ in range(2):  # the second begins where the first ends
                send_orders({1: order, 2: order.flip(0)}, comm)
            return []
        return [receive_order(0, comm) for _ in range(2)]

    _, first, second = run(3, work, timeout_s=10)
    assert all(torch.equal(received, order) for received in first)
    assert all(torch.equal(received, order.flip(0)) for received in second)
