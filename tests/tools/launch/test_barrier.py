"""A rank's place in a barrier stage, without Spark."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from typing import Any

import pytest
from torch.distributed import TCPStore

from shoal.contracts.store import open_store
from shoal_tools.launch.barrier import seat_of

pytestmark = pytest.mark.quick


class Context:
    """A BarrierTaskContext of one task."""

    def partitionId(self) -> int:
        return 0

    def getTaskInfos(self) -> list[Any]:
        class Info:
            address = "127.0.0.1:0"

        return [Info()]

    def allGather(self, told: str) -> list[str]:
        return [told]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", socket.gethostname()])
def test_the_port_of_the_store_is_nobody_elses_until_rank_0_has_it(address: str) -> None:
    with closing(seat_of(Context())) as seat:
        port = int(seat.settings["MASTER_PORT"])
        with pytest.raises(OSError) as taken, socket.socket() as other:
            other.bind(("127.0.0.1", port))
        assert taken.value.errno == errno.EADDRINUSE
        store = open_store(address, port)
        store.set("key", "value")
        assert TCPStore(address, port, wait_for_workers=False).get("key") == b"value"
