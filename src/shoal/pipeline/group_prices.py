"""Prices of a pipeline with groups of ranks: its replicas at once, and the mean in each group.

A replica is a pipeline of its own ranks, with the rows of these alone. The ranks of one host share
its link as in any plan. Replicas wait for one another in the means of gradients, so the slowest
counts. A group's mean begins when its own backward is over: that of the first station, which ends
last, is waited for whole, the others as far as they last longer.

Reference: Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (stages that are replicated).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core.cost import Traffic, total
from shoal.core.facts import Cluster, LayerProfile
from shoal.core.rank_groups import RankGroups
from shoal.pipeline.prices import WHOLE, RowPassage, StationUses, stations_at, step_of, traffic_of

_COPY_S = 1e-9  # seconds for a byte between two ranks of one host, if processors' are not measured


def stations_in_groups(
    layers: Sequence[LayerProfile], held: Mapping[str, Sequence[int]], groups: RankGroups
) -> list[list[StationUses]]:
    """Return the stations of each replica, with ranks counted among all.

    Args:
        layers: the layers.
        held: the ranks of each layer, ascending.
        groups: the groups of ranks.
    """
    return [
        stations_at(layers, {name: ranks[number] for name, ranks in held.items()})
        for number in range(groups.count)
    ]


def group_bytes(layers: Sequence[LayerProfile], held: Mapping[str, Sequence[int]]) -> list[float]:
    """Return the bytes of gradients of each group, by the groups' first ranks in order."""
    nbytes: dict[int, float] = {}
    for layer in layers:
        first = held[layer.name][0]
        nbytes[first] = nbytes.get(first, 0) + layer.nbytes
    return [nbytes[first] for first in sorted(nbytes)]


def step_of_groups(
    layers: Sequence[LayerProfile],
    held: Mapping[str, Sequence[int]],
    groups: RankGroups,
    cluster: Cluster,
    passage: RowPassage = WHOLE,
) -> tuple[float, float]:
    """Return the seconds of forward and of backward, with waits and the means in groups.

    Args:
        layers: the layers.
        held: the ranks of each layer, ascending.
        groups: the groups of ranks.
        cluster: all ranks.
        passage: the way of rows through a replica.
    """
    by_replica = stations_in_groups(layers, held, groups)
    steps = {
        (tuple(each.pace for each in stations), _pattern(ranks, cluster)): step_of(
            [replace(each, rank=ranks.index(each.rank)) for each in stations],
            _among(ranks, cluster),
            passage,
        )
        for ranks, stations in zip(groups.replicas, by_replica, strict=True)
    }
    forward_s = max(forward for forward, _ in steps.values())
    backward_s = max(backward for _, backward in steps.values())
    return forward_s, backward_s + _mean_s(layers, held, groups, cluster, by_replica[0])


def _pattern(ranks: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Return which ranks of a replica share a host: replicas that are alike take as long."""
    hosts = [cluster.topology.hosts[rank] for rank in ranks]
    return tuple(hosts.index(host) for host in hosts)


def _among(ranks: Sequence[int], cluster: Cluster) -> Cluster:
    """Return some of the ranks as a cluster of their own."""
    moves, part = cluster.moves, (len(ranks) - 1) / max(1, cluster.size - 1)
    if moves is not None:  # a move among fewer ranks has fewer messages
        moves = replace(moves, cpu=replace(moves.cpu, round_s=moves.cpu.round_s * part))
    return replace(
        cluster, topology=cluster.topology.among(ranks), servers=(), tail=(), moves=moves
    )


def _mean_s(
    layers: Sequence[LayerProfile],
    held: Mapping[str, Sequence[int]],
    groups: RankGroups,
    cluster: Cluster,
    stations: Sequence[StationUses],
) -> float:
    """Return the seconds for which backward waits for the means in groups."""
    nbytes = dict(zip((g[0] for g in groups.groups), group_bytes(layers, held), strict=True))
    longest_s, after_s = 0.0, 0.0  # seconds of the backward that follows a station's own
    for station in stations:
        group = next(group for group in groups.groups if station.rank in group)
        own_s = _sum_s(nbytes[group[0]], group, cluster)
        longest_s = max(longest_s, own_s - after_s)
        after_s += station.backward_s
    return longest_s


def _sum_s(nbytes: float, group: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of a ring that sums a group's gradients, and of the copies around it."""
    ranks, topology, link = len(group), cluster.topology, cluster.link
    sent = 2 * nbytes * (ranks - 1) / ranks
    copied_s = 2 * nbytes * cluster.pack_byte_s
    if any(topology.apart(group[0], rank) for rank in group):
        return copied_s + sent / link.bytes_per_s + 2 * (ranks - 1) * link.latency_s
    return copied_s + sent * (link.cpu_s_per_byte or _COPY_S)


def traffic_in_groups(
    layers: Sequence[LayerProfile],
    held: Mapping[str, Sequence[int]],
    groups: RankGroups,
    cluster: Cluster,
    passage: RowPassage = WHOLE,
) -> tuple[Traffic, Traffic]:
    """Return the bytes of forward, and of backward with the means in groups."""
    there, back = list[Traffic](), list[Traffic]()
    by_replica = stations_in_groups(layers, held, groups)
    for ranks, stations in zip(groups.replicas, by_replica, strict=True):
        crossing = traffic_of(stations, cluster.size, passage, len(ranks))
        returning = replace(crossing, sent=crossing.received, received=crossing.sent)
        there.append(_leaving(crossing, cluster, stations))
        back.append(_leaving(returning, cluster, stations))
    summed = [0.0] * cluster.size
    leaving = [0.0] * cluster.size
    for group, nbytes in zip(groups.groups, group_bytes(layers, held), strict=True):
        for rank, to in zip(group, (*group[1:], group[0]), strict=True):
            summed[rank] = 2 * nbytes * (len(group) - 1) / len(group)
            leaving[rank] = summed[rank] * cluster.topology.apart(rank, to)
    means = Traffic(tuple(summed), tuple(summed), 0, tuple(leaving))
    return total(there), total([*back, means])


def _leaving(traffic: Traffic, cluster: Cluster, stations: Sequence[StationUses]) -> Traffic:
    """Return the traffic of a replica, in which bytes within a host leave none."""
    hosts = {cluster.topology.hosts[station.rank] for station in stations}
    return traffic if len(hosts) > 1 else replace(traffic, leaving=(0.0,) * cluster.size)
