"""Sums climb a binary tree and the total comes down again, in chunks without a gap.

            0             rank i's children are 2i + 1 and 2i + 2
          /   \\
         1     2          chunk c climbs while chunk c − lag comes down, lag = this rank's way to
        / \\   /           the root and back: the two directions of every link are busy at once
       3   4 5

2·depth + chunks − 1 steps, depth = floor(log2 P). A rank sends n to its parent and n to each child,
and receives as much: the busiest sends 1, 2, 2, 3, 3 … × n for P = 2, 3, 4, 5, 6 …, against less
than 2·n on the ring. So it wins only where latency rules. Without chunks the levels would add up.
After `reduce` the root alone could hold the sum, not each rank its slice, so `reduce` does both
ways and `gather` nothing. An empty tensor sends nothing.

Source: FireCaffe (Iandola et al., CVPR 2016), on reduction trees; the pipelining of one tree in
Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm, Pending
from shoal.contracts.exchange import Bucket, Exchange
from shoal.core.cost import Traffic
from shoal.core.errors import UsageError
from shoal.core.facts import Topology
from shoal.core.pieces import chunks_of
from shoal.exchange.arrivals import after_sending, arrivals, landing_beside

_CHUNKS = 4  # at least, of a bucket that is measured in place of a large one


@final
@dataclass(frozen=True)
class Tree(Exchange):
    """A pipelined binary heap tree; `chunk_bytes` is the size of one message."""

    name: ClassVar[str] = "tree"
    chunk_bytes: int = 256 * 1024

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise UsageError(
                "a tree's chunk_bytes is at least 1", got=str(self.chunk_bytes), do="leave it out"
            )

    def scaled(self, nbytes: int) -> Tree:
        """Small buckets go in `_CHUNKS` chunks: in one, the seconds of all levels would add up."""
        return replace(self, chunk_bytes=min(self.chunk_bytes, max(1, nbytes // _CHUNKS)))

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """The whole bucket once along every edge, each way."""
        ranks = topology.size
        edges = [[*_children(r, ranks), *([(r - 1) // 2] if r else [])] for r in range(ranks)]
        both_ways = tuple(bucket.nbytes * len(ends) for ends in edges)
        leaving = tuple(
            bucket.nbytes * sum(topology.apart(r, end) for end in ends)
            for r, ends in enumerate(edges)
        )
        chunks = -(-bucket.numel // max(1, self.chunk_bytes // bucket.itemsize))
        rounds = 2 * _depth(ranks) + chunks - 1 if ranks > 1 and chunks else 0
        return Traffic(sent=both_ways, received=both_ways, rounds=rounds, leaving=leaving)

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum up to the root and bring the total down, chunk by chunk."""
        if comm.size == 1 or not flat.numel():
            return
        parent, children = (comm.rank - 1) // 2, _children(comm.rank, comm.size)
        chunks, lag = chunks_of(flat, self.chunk_bytes), 2 * _depth(comm.rank + 1)
        climbing = [arrivals(comm, child, landing_beside(chunks)) for child in children]
        up: list[Pending] = []
        down: list[Pending] = []
        for step in range(len(chunks) + lag):
            if step < len(chunks):  # one chunk up
                for arriving in climbing:
                    chunks[step].add_(next(arriving))
                if comm.rank > 0:
                    up.append(comm.send(chunks[step], parent))
            if step == lag:
                falling = (
                    arrivals(comm, parent, after_sending(chunks, up))
                    if comm.rank > 0
                    else iter(chunks)
                )
            if step >= lag:  # an earlier one down
                total = next(falling)
                down += [comm.send(total, child) for child in children]
        for send in down:
            send.wait()

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Nothing left to do."""


def _children(rank: int, ranks: int) -> list[int]:
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]


def _depth(ranks: int) -> int:
    return ranks.bit_length() - 1
