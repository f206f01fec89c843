"""Sending to many ranks: to three at a time, so that no receiver's link is overrun."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.comm.threads import ThreadComm, run

pytestmark = pytest.mark.quick


class Sending:
    """A send that ends when it is waited for."""

    def __init__(self, to: int, under_way: list[int]) -> None:
        self._to, self._under_way = to, under_way

    def wait(self) -> None:
        self._under_way.remove(self._to)


@pytest.mark.parametrize(("ranks", "servers", "most"), [(2, 0, 1), (4, 0, 3), (8, 0, 3), (8, 2, 7)])
def test_three_ranks_are_sent_to_at_a_time_and_with_servers_all(
    ranks: int, servers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: ThreadComm) -> None:
        if comm.rank > 0:
            return
        under_way: list[int] = []
        sent: list[int] = []
        numbers: list[int] = []

        def send(tensor: Tensor, to: int) -> Sending:
            under_way.append(to)
            sent.append(to)
            numbers.append(len(set(under_way)))
            return Sending(to, under_way)

        monkeypatch.setattr(comm, "send", send)
        parts = [torch.ones(1), torch.ones(2)]
        last = comm.send_in_turn((r, parts) for r in comm.others)
        assert sent == [r for r in comm.others for _ in parts]
        assert max(numbers) == most
        comm.finish(last)
        assert under_way == [], "all are waited for"

    run(ranks, work, servers=servers)
