"""This rank's replica of a pipeline, if groups of ranks hold the layers.

A replica is a pipeline of its own, over a channel among its ranks alone. There they count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from shoal.contracts.comm import Comm
from shoal.core.rank_groups import RankGroups


@final
@dataclass(frozen=True)
class PipelineReplica:
    """The ranks through which this rank's rows go, and the ranks with the same layers as here.

    Args:
        groups: the groups of all ranks.
        number: the replica's number.
        comm: the ranks of the replica.
        holding: the ranks that hold the same layers as this one; None if it holds none.
    """

    groups: RankGroups
    number: int
    comm: Comm
    holding: Comm | None

    @classmethod
    def open(cls, comm: Comm, groups: RankGroups) -> Self:
        """Open the channels of this rank's replica and group, in the same order on all ranks.

        Args:
            comm: all ranks.
            groups: the groups of all ranks.
        """
        number = groups.replica_of(comm.rank)
        own = groups.group_of(comm.rank)
        replica = comm.group(groups.replicas[number])
        return cls(groups, number, replica, comm.group(own) if own else None)

    @property
    def share(self) -> float:
        """The replica's part of all ranks."""
        return self.comm.size / self.groups.ranks

    def holders(self, groups: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the rank of each layer, counted in the replica.

        Args:
            groups: the ranks of each layer, counted among all ranks.
        """
        ranks = self.groups.replicas[self.number]
        return {layer: ranks.index(group[self.number]) for layer, group in groups.items()}

    @property
    def channels(self) -> list[Comm]:
        """Its channels, to close them."""
        return [self.comm] if self.holding is None else [self.comm, self.holding]
