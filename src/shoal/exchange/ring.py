"""Slices travel round a ring of neighbours: each rank talks to two others only.

    step      0        1        2          P = 4, seen on rank r
    sends     r−1      r−2      r−3        reduce: a slice goes r+1, r+2, … and ends, summed, on
    receives  r−2      r−3      r          its owner r
    sends     r        r−1      r−2        gather: and once more round
    receives  r−1      r−2      r−3

A slice travels in chunks, each of which goes on as soon as it is added, while the next ones arrive:
so the link does not idle from step to step. P−1 steps each way, and one more for every further
chunk of a slice, as in any pipeline; each is the latency of a message. Each rank sends and receives
2·n·(P−1)/P bytes, to the byte as the slices fall; empty slices (fewer elements than ranks) are sent
by nobody and awaited by nobody. A slice is added in ring order, always the same.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Coding, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.errors import UsageError
from shoal.core.facts import Topology
from shoal.core.pieces import chunks_of
from shoal.exchange.arrivals import arrivals, landing_beside


@final
@dataclass(frozen=True)
class Ring(SplitExchange):
    """Reduce-scatter and all-gather among neighbours, in messages of at most `chunk_bytes`."""

    name: ClassVar[str] = "ring"
    chunk_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise UsageError(
                "a ring's chunk_bytes is at least 1", got=str(self.chunk_bytes), do="leave it out"
            )

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Return twice all slices, less the ones not sent (r, r+1) or not received (r−1, r)."""
        return self.coding_traffic(bucket, bucket, bucket, topology)

    def coding_traffic(
        self, bucket: Bucket, there: Bucket, back: Bucket, topology: Topology
    ) -> Traffic:
        """Return the bytes if each slice is as long as its message, there and back."""
        ranks = topology.size
        sizes, returned = there.slice_bytes(ranks), back.slice_bytes(ranks)
        all_bytes = sum(sizes) + sum(returned)
        sent = tuple(all_bytes - sizes[r] - returned[(r + 1) % ranks] for r in range(ranks))
        return Traffic(
            sent=sent,
            received=tuple(all_bytes - sizes[r - 1] - returned[r] for r in range(ranks)),
            rounds=self._rounds(there, ranks) + self._rounds(back, ranks),
            leaving=tuple(sent[r] * topology.apart(r, (r + 1) % ranks) for r in range(ranks)),
        )

    def _rounds(self, bucket: Bucket, ranks: int) -> int:
        """Return the rounds of one way."""
        if ranks == 1 or not bucket.numel:
            return 0
        chunk = max(1, self.chunk_bytes // bucket.itemsize) * bucket.itemsize
        return ranks - 2 + -(-max(bucket.slice_bytes(ranks)) // chunk)

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Add up each slice on its way to its owner."""
        self._pass_on(slices, comm, first=comm.rank - 1, add=True)

    def reduce_codes(self, coding: Coding, comm: Comm) -> None:
        """Add up each slice on its way, and code each sum anew. A slice goes on when it is whole.

        So each rank keeps the errors of its own codes.
        """
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        order = [(comm.rank - 1 - step) % comm.size for step in range(comm.size)]
        incoming = [coding.landing(owner) for owner in order[1:]]
        arriving = arrivals(
            comm,
            left,
            [chunk for part in incoming for chunk in chunks_of(part, self.chunk_bytes)],
        )
        sends = []
        for outgoing, coming, message in zip(order, order[1:], incoming, strict=False):
            sent = coding.message(outgoing)
            sends += [comm.send(chunk, right) for chunk in chunks_of(sent, self.chunk_bytes)]
            for _ in chunks_of(message, self.chunk_bytes):
                next(arriving)
            coding.add(coming, (None, message))
        for send in sends:
            send.wait()

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Send each summed slice once round."""
        self._pass_on(slices, comm, first=comm.rank, add=False)

    def _pass_on(self, slices: Sequence[Tensor], comm: Comm, first: int, add: bool) -> None:
        """Send slice `first` to the right, and add or take the slices that come from the left.

        All slices go on, except the last.
        """
        if comm.size == 1:
            return
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        in_order = [slices[(first - step) % comm.size] for step in range(comm.size)]
        outgoing, *coming = [chunks_of(part, self.chunk_bytes) for part in in_order]
        incoming = [chunk for chunks in coming for chunk in chunks]
        num_passed = len(incoming) - len(coming[-1])  # the last slice to come stays here
        arriving = arrivals(comm, left, landing_beside(incoming) if add else incoming)
        sends = [comm.send(chunk, right) for chunk in outgoing]
        for index, (chunk, received) in enumerate(zip(incoming, arriving, strict=True)):
            if add:
                chunk.add_(received)
            if index < num_passed:
                sends.append(comm.send(chunk, right))
        for send in sends:
            send.wait()
