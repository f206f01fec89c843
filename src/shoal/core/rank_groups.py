"""Groups of ranks that hold the same layers of a pipeline, and the replicas that they make.

    group of the front   0  1        replica 0: ranks 0 and 2, one of each group
    group of the end     2  3        replica 1: ranks 1 and 3

The rows of a rank go through the ranks of its own replica alone. In each group the ranks take the
mean of their gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from shoal.core.errors import PlanError


@dataclass(frozen=True)
class RankGroups:
    """Groups of equal size, in the order of their first ranks.

    Args:
        groups: the ranks of each group, ascending.
        ranks: number of ranks that train.

    Examples:
        >>> RankGroups(((0, 1), (2, 3)), ranks=4).replicas
        ((0, 2), (1, 3))
    """

    groups: tuple[tuple[int, ...], ...]
    ranks: int

    @classmethod
    def of(cls, named: Iterable[Sequence[int]], ranks: int) -> Self | None:
        """Return the groups that layers name; None if each layer is on one rank.

        Args:
            named: the ranks of each layer, ascending.
            ranks: number of ranks that train.

        Raises:
            PlanError: groups have unlike sizes, or share a rank, or name a rank twice, or one that
                brings no rows.
        """
        groups = sorted({tuple(group) for group in named})
        if all(len(group) == 1 for group in groups):
            return None
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise PlanError(
                "a pipeline has groups of unlike sizes",
                got=_text_of(groups),
                do="name as many ranks for each layer",
            )
        if most := [rank for rank, n in Counter(r for g in groups for r in g).items() if n > 1]:
            raise PlanError(
                f"rank {most[0]} is named twice, by one group or by two",
                got=_text_of(groups),
                do="let groups have no rank in common",
            )
        if max(rank for group in groups for rank in group) >= ranks:
            raise PlanError(
                "a host that brings no rows is in a group of a pipeline",
                got=_text_of(groups),
                do=f"name ranks that train in groups: 0 … {ranks - 1}",
            )
        if len(groups) == 1:
            raise PlanError(
                "all layers are on one group of ranks, which is no pipeline",
                got=_text_of(groups),
                do='name two groups or more; or pin the layers to "replicate"',
            )
        return cls(tuple(groups), ranks)

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.groups[0])

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica, ascending. Ranks without layers are dealt to all."""
        held = {rank: number for group in self.groups for number, rank in enumerate(group)}
        idle = [rank for rank in range(self.ranks) if rank not in held]
        held |= {rank: place % self.count for place, rank in enumerate(idle)}
        return tuple(
            tuple(rank for rank in range(self.ranks) if held[rank] == number)
            for number in range(self.count)
        )

    def replica_of(self, rank: int) -> int:
        """Return the number of a rank's replica."""
        return next(number for number, ranks in enumerate(self.replicas) if rank in ranks)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank; () if it holds no layers."""
        return next((group for group in self.groups if rank in group), ())


def _text_of(groups: Iterable[Sequence[int]]) -> str:
    return ", ".join("+".join(map(str, group)) for group in groups)
