"""Hosts that are only imagined, with figures that were measured on the real ones.

    rate        if the link is so many times slower, a byte takes as many times longer; its
                processor time stays
    ranks       if a rank sends to every other one at once, a message's time counts for each
    no links    if a lone process measured none: the full 1 Gbit/s, or another rate, and 1 ns of
                processor time a byte (docs/lab/benchmarks.md)

Every exchange states its bytes, and its messages in a row, for any number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from shoal.codecs.coded_exchange import read_exchange
from shoal.contracts.exchange import Exchange
from shoal.core.cost import Pace, Price
from shoal.core.facts import Cluster, Link, ModelProfile, Topology
from shoal.core.foresight import Network
from shoal.exchange.direct import Direct

_UNKNOWN = Link(latency_s=1e-4, bytes_per_s=125e6, cpu_s_per_byte=1e-9)  # 1 Gbit/s


def imagined(measured: Cluster, ranks: int, network: Network) -> Cluster:
    """Imagine so many ranks, each on its own host, otherwise like the measured ones."""
    topology = Topology(tuple(f"h{rank}" for rank in range(ranks)))
    known = measured.size > 1
    link = measured.link if known else _UNKNOWN
    whole = link.bytes_per_s * measured.topology.ranks_per_host  # the host's rate
    rate = (network.bytes_per_s or whole) / network.oversubscription
    latency_s = link.latency_s if network.latency_s is None else network.latency_s
    cluster = Cluster(
        topology,
        replace(link, bytes_per_s=rate, latency_s=latency_s),
        network.cores_per_rank or measured.cores_per_rank,
        # ranks that took turns when measured do so here, too, unless their cores are given
        steady=measured.steady or network.cores_per_rank is not None,
        pack_byte_s=measured.pack_byte_s,
        pack_each_s=measured.pack_each_s,
        duplex=measured.duplex,
        codings=measured.codings,
    )
    if not known:
        return cluster
    slower, later_s = measured.link.bytes_per_s / rate, latency_s - link.latency_s

    def like(exchange: Exchange, pace: Pace) -> Pace:
        times = exchange.at_once(topology) / exchange.at_once(measured.topology)
        own_s = max(0.0, pace.wall.round_s - link.latency_s)  # seconds of each message
        return Pace(
            Price(
                max(0.0, pace.wall.round_s + later_s + (times - 1) * own_s),
                pace.wall.byte_s * slower,
            ),
            Price(pace.cpu.round_s * times, pace.cpu.byte_s),
        )

    paces = {name: like(read_exchange(name), pace) for name, pace in measured.paces.items()}
    moves = measured.moves and like(Direct(), measured.moves)
    return replace(cluster, paces=MappingProxyType(paces), moves=moves)


def at_rate(cluster: Cluster, times: float) -> Cluster:
    """Return the same hosts on links that carry so many times as much."""

    def like(pace: Pace) -> Pace:
        return replace(pace, wall=replace(pace.wall, byte_s=pace.wall.byte_s / times))

    return replace(
        cluster,
        link=replace(
            cluster.link,
            bytes_per_s=cluster.link.bytes_per_s * times,
            tried=cluster.link.tried * times,
        ),
        paces={name: like(pace) for name, pace in cluster.paces.items()},
        moves=cluster.moves and like(cluster.moves),
    )


def stretch(profile: ModelProfile, times: float) -> ModelProfile:
    """Return the profile of ranks that compute so many times as long."""
    layers = tuple(
        replace(
            layer,
            parameters=tuple(replace(p, ready_s=p.ready_s * times) for p in layer.parameters),
            needed_s=layer.needed_s * times,
            forward_s=layer.forward_s * times,
            backward_s=layer.backward_s * times,
        )
        for layer in profile.layers
    )
    return replace(
        profile,
        layers=layers,
        forward_s=profile.forward_s * times,
        backward_s=profile.backward_s * times,
        optimizer_s=profile.optimizer_s * times,
        update=profile.update.times(times),
    )
