"""A rank's place in a barrier stage, without Spark."""

from __future__ import annotations

import errno
import socket
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from shoal.contracts.store import open_store
from shoal_tools.launch.barrier import seat_of

pytestmark = pytest.mark.quick


class Context:
    """A BarrierTaskContext of one task, which may have GPUs."""

    def __init__(self, *gpus: str) -> None:
        self.gpus = gpus

    def resources(self) -> dict[str, Any]:
        return {"gpu": SimpleNamespace(name="gpu", addresses=list(self.gpus))} if self.gpus else {}

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


def test_a_rank_sees_the_gpus_of_its_task_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = {}
    for context in (Context(), Context("3"), Context("1", "2")):
        with closing(seat_of(context)) as seat:
            seen[context.gpus] = seat.settings.get("CUDA_VISIBLE_DEVICES")
            assert seat.settings["LOCAL_RANK"] == "0"
    assert seen == {(): None, ("3",): "3", ("1", "2"): "1,2"}


def test_an_executor_that_sees_some_gpus_already_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with closing(seat_of(Context("0"))) as seat:
        assert "CUDA_VISIBLE_DEVICES" not in seat.settings
