"""Counts what a rank sends and receives, so that stated bytes can be held against real ones.

Wraps any Comm at no cost but the counting; nothing crosses uncounted but `gather_objects`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import final

from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal_tools.testing.around import Around


@dataclass
class Counts:
    """Bytes and messages of a rank over all channels, counted when sends and receives begin."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_leaving: int = 0  # of those sent, what went to other hosts
    # channels are used by several threads
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def sent(self, nbytes: int, leaving: bool) -> None:
        """Count one message out, to another host where it is `leaving`."""
        with self._lock:
            self.bytes_sent += nbytes
            self.bytes_leaving += nbytes * leaving
            self.messages_sent += 1

    def received(self, nbytes: int) -> None:
        """Count one message in."""
        with self._lock:
            self.bytes_received += nbytes
            self.messages_received += 1


@final
class TracedComm(Around):
    """`inner`, counted. Channels made from it count into the same `counts`."""

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
        """A channel of its own, counted together with this one."""
        return TracedComm(self.inner.channel(name, idle=idle), self.counts)

    def group(self, ranks: Sequence[int]) -> TracedComm:
        """Those ranks only, counted together with this one."""
        return TracedComm(self.inner.group(ranks), self.counts)
