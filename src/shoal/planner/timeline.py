"""The timeline of one step: what a plan's transfers cost beside the backward they hide under.

One rank's main thread computes; its lanes take transfers in the plan's order, share one link, and compute too:

    backward   |── layer 9 ──|── layer 8 ──|─────── layer 7 ───────|──┄┄       profile's times and strategy's changes
    lane 0                   |▒▒ send 9 ▒▒|== multiply ==|                      link, then the lane's own compute
    lane 1                                 |··· waits ···|▒▒▒▒ send 8, 7 ▒▒▒▒|  a transfer starts when its last layer's
                                                                                gradient is there and a lane is free
    step = forward + max(backward, last lane) + optimizer                       (predict)

The link is served in order of start at the exchange's pace; what follows a message is paid on the lane alone.
Where ranks have less than two cores each, what lanes compute, and the processor time of the exchange, is taken from the
main thread (stolen). What hides costs nothing until link or processor is full. Equations: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal import exchange as exchanges
from shoal import strategies
from shoal.core.contracts import Exchange, Strategy
from shoal.core.cost import Cost
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.plan import Choice, Plan, Site
from shoal.core.registry import found, named


@dataclass(frozen=True)
class Span:
    """One site on its lane: seconds since backward began."""

    site: Site
    ready_s: float
    sent_s: float  # its last byte is through
    end_s: float  # its gradients are there


@dataclass(frozen=True)
class Timeline:
    """A step as the planner sees it, on one rank."""

    forward_s: float
    backward_s: float  # of the main thread, with what lanes take from it
    end_s: float  # since backward began, until every gradient is there
    optimizer_s: float
    spans: tuple[Span, ...]
    sent_bytes: float  # through the busiest direction of the link

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.end_s + self.optimizer_s


class Predictor:
    """Predicts steps of one model on one cluster; what it works out for a site it keeps."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self._layers = {layer.name: layer for layer in profile.layers}
        self._nbytes = {layer.name: layer.nbytes for layer in profile.layers}
        self._strategies = {name: kind() for name, kind in found(strategies, Strategy).items()}
        self._bucketed = frozenset(name for name, kind in self._strategies.items() if kind.bucketed)
        self._costs: dict[Site, Cost] = {}

    def refusal(self, layer: LayerProfile, strategy: str) -> str | None:
        """Why a strategy cannot serve a layer, or None."""
        return self._strategies[strategy].refuses(layer, self.cluster)

    def strategy(self, name: str) -> Strategy:
        """A strategy by its name."""
        return self._strategies[name]

    def bucketed(self, strategy: str) -> bool:
        """Whether the strategy takes several layers and an exchange."""
        return strategy in self._bucketed

    def cost(self, site: Site) -> Cost:
        """What serving a site costs one rank."""
        if site not in self._costs:
            carrier = named(exchanges, Exchange, site.exchange) if site.exchange else None
            layers = [self._layers[name] for name in site.layers]
            self._costs[site] = self._strategies[site.strategy].estimate(layers, carrier, self.cluster)
        return self._costs[site]

    def alone_s(self, choice: Choice) -> tuple[float, float]:
        """Bytes, and seconds of link and lane, of one layer served by itself."""
        cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
        return cost.traffic.worst, cost.pace.wall.of(cost.traffic) + cost.lane_s

    def predict(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> Timeline:
        """The timeline of a step under these choices."""
        plan = Plan(self.cluster.size, self.profile.digest, tuple(choices), bucket_bytes, lanes)
        sites = list(plan.sites(self._nbytes, self._bucketed))
        waiting: dict[str, list[int]] = {}
        for index, site in enumerate(sites):
            waiting.setdefault(site.layers[-1], []).append(index)
        changes = {site.layers[-1]: self.cost(site).backward_s for site in sites}
        return self._run(sites, waiting, changes, lanes)

    def _run(self, sites: list[Site], waiting: dict[str, list[int]], changes: dict[str, float], lanes: int) -> Timeline:
        stolen_part = min(1.0, max(0.0, 2.0 - self.cluster.cores_per_rank))
        cores = min(1.0, self.cluster.cores_per_rank)
        lane_free = [0.0] * lanes
        link_free = lane_cpu_free = clock = profiled = sent_bytes = 0.0
        debts: list[tuple[float, float]] = []  # (when, seconds of lane compute that the main thread will feel)
        spans: list[Span] = []

        def start(now: float) -> None:
            nonlocal link_free, lane_cpu_free, sent_bytes
            index = len(spans)
            cost, lane = self.cost(sites[index]), index % lanes
            begin = max(now, lane_free[lane])
            sent = max(begin, link_free) + cost.traffic.worst * cost.pace.wall.byte_s
            link_free = sent
            arrived = sent + cost.traffic.rounds * cost.pace.wall.round_s
            end = max(arrived, lane_cpu_free if stolen_part else 0.0) + cost.lane_s
            lane_cpu_free = end
            lane_free[lane] = end
            debts.append((arrived, stolen_part * (cost.lane_s + cost.pace.cpu.of(cost.traffic) / cores)))
            spans.append(Span(sites[index], now, sent, end))
            sent_bytes += cost.traffic.worst

        ready = [False] * len(sites)
        for layer in self.profile.layers:
            clock += max(0.0, layer.ready_s - profiled + changes.get(layer.name, 0.0))
            profiled = max(profiled, layer.ready_s)
            clock = self._pay(clock, debts)
            for index in waiting.get(layer.name, ()):
                ready[index] = True
            while len(spans) < len(sites) and ready[len(spans)]:
                start(clock)
        clock = self._pay(clock + max(0.0, self.profile.backward_s - profiled), debts)
        end = max([clock, *(span.end_s for span in spans)])
        return Timeline(self.profile.forward_s, clock, end, self.profile.optimizer_s, tuple(spans), sent_bytes)

    @staticmethod
    def _pay(clock: float, debts: list[tuple[float, float]]) -> float:
        """Push the clock by the lane compute that fell due, which may make more of it due."""
        while debts and debts[0][0] <= clock:
            clock += debts.pop(0)[1]
        return clock
