"""Counts the bytes that a rank sends and receives, so that stated bytes can be checked.

It wraps any Comm, and costs only the counting. All messages are counted except `gather_objects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import final

from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal_tools.testing.comm_wrapper import Around


@dataclass
class Counts:
    """Bytes and messages of a rank over all channels, counted when sends and receives begin."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_leaving: int = 0  # part of the bytes sent that went to other hosts
    # channels are used by several threads
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def sent(self, nbytes: int, leaving: bool) -> None:
        """Count one sent message; `leaving` if it goes to another host."""
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_leaving += nbytes * leaving
            self.messages_sent += 1

    def received(self, nbytes: int) -> None:
        """Count one received message."""
        with self._lock:
            self.bytes_received += nbytes
            self.messages_received += 1


@final
class TracedComm(Around):
    """`inner` with counts. Channels made from it count into the same `counts`."""

    def __init__(self, inner: Comm, counts: Counts | None = None) -> None:
        super().__init__(inner)
        self.counts = counts or Counts()

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Count and send."""
        self.counts.sent(tensor.nbytes, leaving=self.topology.apart(self.rank, to))
        return self.inner.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """Count and receive."""
        self.counts.received(tensor.nbytes)
        return self.inner.receive(tensor, source)

    def channel(self, name: str, *, idle: bool = False) -> TracedComm:
        """Return a channel that is counted together with this one."""
        return TracedComm(self.inner.channel(name, idle=idle), self.counts)

    def group(self, ranks: Sequence[int]) -> TracedComm:
        """Return a group of ranks that is counted together with this one."""
        return TracedComm(self.inner.group(ranks), self.counts)
