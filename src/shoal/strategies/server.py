"""Server: hosts of their own hold slices of buckets, update them, and send new parameters.

    worker ──▶ slices of its gradients ──▶ servers (if these are few, workers own a share too)
    worker ◀── new parameters ◀─────────── updated by the servers

With a staleness, a worker that steps need not wait for the others. At its step c it goes on as soon
as servers have applied all gradients of step c − staleness. Each step's gradients are one update,
in the order of the ranks. Without a bound, each gradient is an update of its own, applied as it
comes. A bound of 0 is the synchronous step.

Only the owners differ from `sliced`. With as many servers as workers, a worker sends and receives
each byte once, while all-reduce does so 2·(P−1)/P times. With fewer servers, workers own the share
that makes all links equally busy. This pays if you have spare hosts that do not train.

Source: Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training in
Heterogeneous GPU/CPU Clusters" (BytePS), OSDI 2020, section 4.1. Staleness: Ho et al., "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013,
section 3; there a worker sees its own updates at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shoal.contracts.exchange import Exchange, SplitExchange
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import Transfer
from shoal.core.cost import Cost
from shoal.core.facts import Cluster, LayerProfile, Topology
from shoal.core.role import Role
from shoal.profiling.updates import UpdateProbe
from shoal.strategies.landing import by_kind
from shoal.strategies.sliced import SlicedTransfer, owned_cost, update_refusal


@final
class Server(Strategy):
    """Sums and updates at servers, and gathers the new parameters from there."""

    name = "server"
    role = Role.SERVED
    probes = (UpdateProbe,)

    def takes(self, exchange: Exchange) -> bool:
        return isinstance(exchange, SplitExchange) and exchange.serves

    def refuses(self, layer: LayerProfile, cluster: Cluster) -> str | None:
        return None if cluster.apart else update_refusal(layer)  # no server updates anything then

    def estimate(
        self, layers: Sequence[LayerProfile], exchange: Exchange | None, cluster: Cluster
    ) -> Cost:
        assert exchange is not None
        everyone = Topology(cluster.topology.hosts + cluster.servers, len(cluster.servers))
        each_own = shares(cluster.size, len(cluster.servers), stale=cluster.ahead)
        return owned_cost(layers, exchange, cluster, each_own, everyone)

    def apply(self, place: Place, exchange: Exchange | None, label: str) -> list[Transfer]:
        assert isinstance(exchange, SplitExchange)
        each_own = shares(place.ranks, place.servers, stale=place.stale)
        return [
            SlicedTransfer(kind, exchange, place, each_own, label)
            for kind in by_kind(place.parameters)
        ]


def shares(workers: int, servers: int, stale: bool = False) -> tuple[float, ...]:
    """Return the share of each rank, workers first, so that every link carries the same.

    Of n bytes, a worker that owns w sends n + (W − 2)·w in a step, and a server that owns s sends
    W·s; W·w + S·s = n. Both are equal at w = n·(W − S) / (W² + S·(W − 2)). Workers own nothing if
    there are as many servers, or if workers run ahead of one another.
    """
    idle = stale or servers >= workers
    worker_share = 0.0 if idle else (workers - servers) / (workers**2 + servers * (workers - 2))
    return (worker_share,) * workers + ((1 - workers * worker_share) / servers,) * servers
