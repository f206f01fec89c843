"""Every slice goes straight to its owner, who adds and sends it straight back: every rank is the master of one slice.

    reduce   rank r ── slice o of its own ──▶ owner o        for every r ≠ o; the owner adds in rank order
    gather   rank r ◀── slice o, summed ───── owner o

2 steps, whatever P. Each rank sends and receives 2·n·(P−1)/P bytes, to the byte as the slices fall; empty slices (fewer
elements than ranks) are sent by nobody and awaited by nobody. Added in the order of the ranks, so that the bits depend
neither on which message comes first nor on how parameters are put into buckets.
Source: CaffeOnSpark's socket exchange, in which every node is master of a slice; the pairwise exchange for
reduce-scatter of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.core.contracts import Bucket, Comm, Exchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.core.pieces import cut, cut_sizes


@final
@dataclass(frozen=True)
class Direct(Exchange):
    """Slices to their owners and back, each in one message."""

    name: ClassVar[str] = "direct"
    splits: ClassVar[bool] = True

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """A rank sends foreign slices once and its own to every other rank, and receives as much."""
        others = topology.size - 1
        sizes = [size * bucket.itemsize for size in cut_sizes(bucket.numel, topology.size)]
        both_ways = tuple((bucket.nbytes - own) + others * own for own in sizes)
        leaving = [0] * topology.size
        for ranks in topology.ranks_on.values():
            beside = sum(sizes[r] for r in ranks)
            for r in ranks:
                leaving[r] = bucket.nbytes - beside + (topology.size - len(ranks)) * sizes[r]
        return Traffic(both_ways, both_ways, rounds=2 if others and bucket.numel else 0, leaving=tuple(leaving))

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Send foreign slices to their owners; add up one's own."""
        slices = cut(flat, comm.size)
        mine, peers = slices[comm.rank], _peers(comm)
        parts = list(mine.new_empty(comm.size - 1, mine.numel()).unbind())
        parts.insert(comm.rank, mine)  # parts[r]: what rank r contributes to my slice

        receives = {r: comm.receive(parts[r], r) for r in peers if mine.numel()}
        sends = [comm.send(slices[r], r) for r in peers if slices[r].numel()]
        total = parts[0]
        for r, part in enumerate(parts):
            if r in receives:
                receives[r].wait()
            if r == comm.rank and r > 0:
                total = mine.add_(total)  # a + b has the bits of b + a, and from here on the sum stands in its place
            elif r > 0:
                total.add_(part)
        for send in sends:
            send.wait()

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Send one's own slice to all; receive theirs in place."""
        slices = cut(flat, comm.size)
        mine, peers = slices[comm.rank], _peers(comm)
        pending = [comm.receive(slices[r], r) for r in peers if slices[r].numel()]
        pending += [comm.send(mine, r) for r in peers if mine.numel()]
        for each in pending:
            each.wait()


def _peers(comm: Comm) -> list[int]:
    """The other ranks, next neighbour first: if all began with rank 0, its link would be the one that all wait for."""
    return [(comm.rank + step) % comm.size for step in range(1, comm.size)]
