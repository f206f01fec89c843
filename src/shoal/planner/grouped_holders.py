"""Groups of ranks for the layers of a pipeline: candidates of every size that divides the ranks.

Ranks of one host form groups first, because the means of their gradients leave no host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.core.facts import Cluster, ModelProfile
from shoal.core.rank_groups import RankGroups
from shoal.pipeline.group_prices import step_of_groups
from shoal.pipeline.prices import RowPassage, stations_at, step_of
from shoal.pipeline.uses import UseFacts
from shoal.planner.holders import holders_of


@dataclass(frozen=True)
class HeldLayers:
    """The ranks of each layer of a pipeline.

    Args:
        ranks: by the layer's name, ascending.
        groups: the groups of ranks; None if each layer is on one rank.
    """

    ranks: Mapping[str, tuple[int, ...]]
    groups: RankGroups | None = None

    @classmethod
    def alone(cls, holders: Mapping[str, int]) -> HeldLayers:
        """Return layers of which each is on one rank."""
        return cls({name: (rank,) for name, rank in holders.items()})

    def step_s(self, profile: ModelProfile, cluster: Cluster, passage: RowPassage) -> float:
        """Return the seconds of forward and backward."""
        if self.groups is None:
            holders = {name: ranks[0] for name, ranks in self.ranks.items()}
            return sum(step_of(stations_at(profile.layers, holders), cluster, passage))
        return sum(step_of_groups(profile.layers, self.ranks, self.groups, cluster, passage))

    def text_of(self, name: str) -> str:
        """Return the ranks of a layer, as pins write them: "0+1"."""
        return "+".join(map(str, self.ranks[name]))


def in_groups(profile: ModelProfile, cluster: Cluster, passage: RowPassage) -> list[HeldLayers]:
    """Return layers dealt to groups of ranks, once for each size of groups.

    There are none if training changes a buffer, or if hosts have unlike numbers of ranks.

    Args:
        profile: the model.
        cluster: the ranks.
        passage: the way of rows through the ranks.
    """
    if profile.moving or cluster.tail or cluster.servers:
        return []
    known = profile.layers[0].measured(UseFacts).paces or (1.0,) * cluster.size
    found = []
    for groups in _groupings(cluster):
        firsts = groups.replicas[0]
        one = replace(cluster, topology=cluster.topology.among(firsts))
        by_first = {group[0]: max(known[rank] for rank in group) for group in groups.groups}
        paces = [by_first[rank] for rank in firsts]  # each group waits for its slowest rank
        dealt = holders_of(profile, one, passage=passage, paces=paces)
        if len(set(dealt.values())) < len(groups.groups):  # fewer layers than groups
            continue
        held = {name: groups.group_of(firsts[rank]) for name, rank in dealt.items()}
        found.append(HeldLayers(held, groups))
    return found


def _groupings(cluster: Cluster) -> Iterator[RankGroups]:
    """Yield groups of each size, of ranks that are on one host as far as possible."""
    hosts: Sequence[Sequence[int]] = [*cluster.topology.ranks_on.values()]
    each = len(hosts[0])
    if any(len(ranks) != each for ranks in hosts):
        return
    order = [rank for ranks in hosts for rank in ranks]
    for size in range(2, len(order) // 2 + 1):
        if len(order) % size == 0 and (each % size == 0 or size % each == 0):
            starts = range(0, len(order), size)
            groups = sorted(tuple(sorted(order[at : at + size])) for at in starts)
            yield RankGroups(tuple(groups), len(order))
