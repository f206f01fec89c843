"""The network library's own reduce-scatter and all-gather: NCCL's, where every rank has a GPU.

The bytes are stated as `Comm` itself sends them: foreign slices to their owners, and one's own to
all. NCCL sends as many, in whatever way it has tuned best. Gloo's are slower than messages, so at
the host this is neither measured nor chosen.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology
from shoal.exchange.direct import Direct


@final
@dataclass(frozen=True)
class Collective(SplitExchange):
    """`comm.reduce_scatter` and `comm.all_gather`."""

    name: ClassVar[str] = "collective"
    native: ClassVar[bool] = True
    at_host: ClassVar[bool] = False

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Foreign slices once, and one's own to every other rank."""
        return Direct().traffic(bucket, topology)

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Sum up each slice at its owner."""
        comm.reduce_scatter(slices)

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Bring each slice to every rank."""
        comm.all_gather(slices, slices[comm.rank])
