"""Sums climb a binary tree and the total comes down again, in chunks that follow one another without a gap.

            0             rank i's children are 2i + 1 and 2i + 2
          /   \\
         1     2          chunk c climbs while chunk c − lag comes down, lag = the way to the root and back:
        / \\   /           the two directions of every link are busy at once
       3   4 5

2·depth + chunks − 1 steps, depth = floor(log2 P). A rank sends n to its parent and n to each child, and receives as
much: the busiest sends 1, 2, 2, 3, 3 … × n for P = 2, 3, 4, 5, 6 …, against less than 2·n on the ring. So it wins only
where latency rules. Without chunks the levels would add up. After `reduce` the root alone could hold the sum, not each
rank its slice, so `reduce` does both ways and `gather` nothing. An empty tensor sends nothing.
Source: FireCaffe (Iandola et al., CVPR 2016), on reduction trees; the pipelining of one tree in Sanders, Speck and
Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.core.contracts import Bucket, Comm, Exchange
from shoal.core.cost import Traffic
from shoal.core.errors import UsageError
from shoal.core.facts import Topology


@final
@dataclass(frozen=True)
class Tree(Exchange):
    """A pipelined binary heap tree; `chunk_bytes` is the size of one message."""

    name: ClassVar[str] = "tree"
    chunk_bytes: int = 512 * 1024

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise UsageError("a tree's chunk_bytes is at least 1", got=str(self.chunk_bytes), do="leave it out")

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """The whole bucket once along every edge, each way."""
        ranks = topology.size
        edges = [[*_children(r, ranks), *([(r - 1) // 2] if r else [])] for r in range(ranks)]
        both_ways = tuple(bucket.nbytes * len(ends) for ends in edges)
        leaving = tuple(bucket.nbytes * sum(topology.apart(r, end) for end in ends) for r, ends in enumerate(edges))
        chunks = -(-bucket.numel // self._chunk(bucket.itemsize))
        rounds = 2 * _depth(ranks) + chunks - 1 if ranks > 1 and chunks else 0
        return Traffic(sent=both_ways, received=both_ways, rounds=rounds, leaving=leaving)

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Sum up to the root and bring the total down, chunk by chunk."""
        if comm.size == 1 or not flat.numel():
            return
        parent, children, lag = (comm.rank - 1) // 2, _children(comm.rank, comm.size), 2 * _depth(comm.size)
        chunks = flat.split(self._chunk(flat.itemsize))
        arrivals = [_arrivals(comm, child, chunks) for child in children]
        up, down = [], []
        for step in range(len(chunks) + lag):
            if step < len(chunks):  # one chunk up
                chunk = chunks[step]
                for arrival in arrivals:
                    chunk.add_(next(arrival))
                if comm.rank > 0:
                    up.append(comm.send(chunk, parent))
            if step >= lag:  # an earlier one down
                chunk = chunks[step - lag]
                if comm.rank > 0:
                    up[step - lag].wait()  # or the total would land on what is still being sent
                    comm.receive(chunk, parent).wait()
                down += [comm.send(chunk, child) for child in children]
        for send in down:
            send.wait()

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Nothing left to do."""

    def _chunk(self, itemsize: int) -> int:
        return max(1, self.chunk_bytes // itemsize)


def _children(rank: int, ranks: int) -> list[int]:
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]


def _depth(ranks: int) -> int:
    return ranks.bit_length() - 1


def _arrivals(comm: Comm, child: int, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
    """A child's chunks, one ahead: the next is on its way while this one is added. Two buffers take turns."""
    buffers = [torch.empty_like(chunks[0]) for _ in chunks[:2]]
    landing = [buffers[i % 2][: chunk.numel()] for i, chunk in enumerate(chunks)]
    ahead = comm.receive(landing[0], child)
    for this, following in zip(landing, [*landing[1:], None], strict=True):
        pending = ahead
        if following is not None:
            ahead = comm.receive(following, child)
        pending.wait()
        yield this
