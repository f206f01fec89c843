"""A network of known speed: ranks as threads whose every message takes a stated time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.threads import Hub, ThreadComm
from shoal.core.contracts import Pending


class ShapedComm(ThreadComm):
    """Ranks as threads whose every receive takes `latency_s` + bytes / `bytes_per_s`."""

    latency_s, bytes_per_s = 2e-3, 50e6

    def __init__(self, rank: int, hub: Hub, name: str = "world") -> None:
        super().__init__(rank, hub, name)

    @classmethod
    def of(cls, comm: ThreadComm) -> ShapedComm:
        return cls(comm.rank, comm.hub, comm.name + " shaped")

    def receive(self, tensor: Tensor, source: int) -> Pending:
        return Slow(super().receive(tensor, source), self.latency_s + tensor.nbytes / self.bytes_per_s)


@dataclass
class Slow:
    pending: Pending
    seconds: float

    def wait(self) -> None:
        end = time.perf_counter() + self.seconds
        self.pending.wait()
        time.sleep(max(0.0, end - time.perf_counter()))
