"""The network library's own all-reduce: one call, in whatever way gloo or NCCL have tuned best.

Its bytes are stated as a ring's. Both libraries run a ring on large tensors, and so does
`Comm.all_reduce`: 2·(P−1) steps, and each rank sends and receives 2·n·(P−1)/P bytes, to the byte as
the slices fall. Both halves happen in `reduce`, so no half is left to hide under the next forward.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.core.pieces import cut_sizes


@final
@dataclass(frozen=True)
class AllReduce(Exchange):
    """`comm.all_reduce`, whole."""

    name: ClassVar[str] = "allreduce"
    native: ClassVar[bool] = True

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Every slice twice, save the two that a rank's place in the ring spares it.

        As in `Comm.all_reduce`.
        """
        ranks, twice = topology.size, 2 * bucket.nbytes
        sizes = [size * bucket.itemsize for size in cut_sizes(bucket.numel, ranks)]
        if ranks == 1:
            return Traffic((0.0,), (0.0,), rounds=0)
        sent = tuple(twice - sizes[(r + 1) % ranks] - sizes[(r + 2) % ranks] for r in range(ranks))
        return Traffic(
            sent=sent,
            received=tuple(twice - sizes[r] - sizes[(r + 1) % ranks] for r in range(ranks)),
            rounds=2 * (ranks - 1),
            leaving=tuple(sent[r] * topology.apart(r, (r + 1) % ranks) for r in range(ranks)),
        )

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Bring the whole sum to every rank."""
        comm.all_reduce(flat)

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Nothing left to do."""
