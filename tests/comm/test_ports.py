"""Ports that close behind the ranks that have connected."""

from __future__ import annotations

import datetime
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from shoal.comm.ports import _listening, _place, close_ports
from shoal.comm.signed_store import SignedStore
from shoal.contracts.store import open_store
from shoal.contracts.store_values import Values

TIME = datetime.timedelta(seconds=20)


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_nobody_connects_to_a_port_that_is_closed(
    family: socket.AddressFamily, address: str
) -> None:
    server = socket.create_server
    with server((address, 0), family=family) as told, server((address, 0), family=family) as other:
        place = told.getsockname()[:2]
        early = socket.create_connection(place, timeout=5)
        peer, _ = told.accept()
        close_ports([b"before" + _place(told) + b"behind"])
        with pytest.raises(TimeoutError):
            socket.create_connection(place, timeout=0.3)
        early.sendall(b"still there")
        assert peer.recv(100) == b"still there"
        socket.create_connection(other.getsockname()[:2], timeout=5).close()
        early.close()
        peer.close()


def test_the_ports_of_a_group_close_and_the_group_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def ports() -> set[int]:
        found = set()
        for listening in _listening():
            with listening:
                found.add(listening.getsockname()[1])
        return found

    def make(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(stores[rank], rank, 2, timeout=TIME)

    def total(rank: int) -> float:
        tensor = torch.tensor([rank + 1.0])
        groups[rank].allreduce([tensor]).wait()
        return tensor.item()

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = open_store("127.0.0.1")
    stores = [SignedStore(Values(store.clone()), 20) for _ in range(2)]  # type: ignore[attr-defined]
    before = ports()
    with ThreadPoolExecutor(2) as ranks:
        groups = list(ranks.map(make, range(2)))
        of_group = ports() - before
        assert len(of_group) == 2
        for each in stores:
            each.is_made()
        for port in of_group:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.3)
        assert list(ranks.map(total, range(2))) == [3.0, 3.0]
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
