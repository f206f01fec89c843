"""A network of known speed: ranks as threads whose every message takes a stated time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.threads import Hub, ThreadComm
from shoal.contracts.comm import Pending


class ShapedComm(ThreadComm):
    """Ranks as threads whose every receive takes `latency_s` + bytes / `bytes_per_s`, but for
    bursts after a pause.
    """

    latency_s, bytes_per_s, burst_bytes = 2e-3, 50e6, 0.0

    def __init__(self, rank: int, hub: Hub, name: str = "world") -> None:
        super().__init__(rank, hub, name)
        self._free_bytes, self._free_at = self.burst_bytes, time.perf_counter()

    @classmethod
    def of(cls, comm: ThreadComm) -> ShapedComm:
        return cls(comm.rank, comm.hub, comm.name + " shaped")

    def receive(self, tensor: Tensor, source: int) -> Pending:
        return Slow(
            super().receive(tensor, source),
            self.latency_s + self._paid(tensor.nbytes) / self.bytes_per_s,
        )

    def _paid(self, nbytes: int) -> float:
        """Of so many bytes that begin now those that do not pass for free."""
        now = time.perf_counter()
        saved = self._free_bytes + (now - self._free_at) * self.bytes_per_s
        free = min(saved, self.burst_bytes, nbytes)
        self._free_bytes = min(saved, self.burst_bytes) - free
        self._free_at = now + (nbytes - free) / self.bytes_per_s
        return nbytes - free


@dataclass
class Slow:
    pending: Pending
    seconds: float

    def wait(self) -> None:
        end = time.perf_counter() + self.seconds
        self.pending.wait()
        time.sleep(max(0.0, end - time.perf_counter()))
