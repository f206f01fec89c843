"""Prices of a pipeline: bytes, and seconds of forward and backward by a small simulation.

Each rank computes its stations in order, of each all micro-batches. Values that cross go out over
the link of their rank, in order. All forward, then all backward: the two are simulated alone.

Beside the layers' own seconds, each micro-batch costs a station the messages before and behind it,
and the sum of gradients that an earlier micro-batch has left. All ranks meet some times in a step.

With S even stations and M micro-batches on processors of their own, where nothing crosses, a
passage takes (M + S - 1) / M of the work of a rank: the bubble is (S - 1) / (M + S - 1).

Reference: Huang et al., "GPipe", 2019, section 3.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, pairwise
from math import inf
from typing import final

from shoal.core.cost import Traffic
from shoal.core.facts import Cluster, LayerProfile
from shoal.pipeline.uses import LayerUse, UseFacts, uses_of


@dataclass(frozen=True)
class StationUses:
    """A station: uses of layers in a row, all held by one rank.

    Args:
        rank: the rank.
        uses: the uses, in the order of forward.
        pace: the rank's seconds, as a part of those of the slowest rank.
    """

    rank: int
    uses: tuple[LayerUse, ...]
    pace: float = 1.0

    @property
    def forward_s(self) -> float:
        """Seconds of forward, for one rank's rows."""
        return self.pace * sum(use.forward_s for use in self.uses)

    @property
    def backward_s(self) -> float:
        """Seconds of backward, for one rank's rows."""
        return self.pace * sum(use.backward_s for use in self.uses)

    @property
    def before_bytes(self) -> float:
        """Bytes that cross before it, for one rank's rows."""
        return self.uses[0].before_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of gradients that each micro-batch adds to."""
        return sum(use.gradient_bytes for use in self.uses)


def stations_at(layers: Sequence[LayerProfile], holders: Mapping[str, int]) -> list[StationUses]:
    """Return the stations of a model's layers, by the rank that holds each."""
    groups = {layer.measured(UseFacts).with_layer or layer.name: layer for layer in layers}
    return stations_of(
        uses_of(layers),
        {name: holders[layer.name] for name, layer in groups.items()},
        layers[0].measured(UseFacts).paces,
    )


def stations_of(
    uses: Sequence[LayerUse], holders: Mapping[str, int], paces: Sequence[float] = ()
) -> list[StationUses]:
    """Return the stations of a model's uses, by the rank that holds each layer.

    Args:
        uses: in the order of forward.
        holders: the rank of each layer.
        paces: of each rank; () if ranks compute alike.
    """
    return [
        StationUses(rank, tuple(own), paces[rank] if 0 <= rank < len(paces) else 1.0)
        for rank, own in groupby(uses, key=lambda use: holders[use.layer])
    ]


@dataclass(frozen=True)
class RowPassage:
    """The way of rows through a pipeline.

    Args:
        parts: parts of each rank's rows, which are a micro-batch each.
        slower: the seconds of all parts, as a multiple of those of a rank's rows at once.
        sent: bytes that go for each byte that crosses, if that crosses as a code.
        code_s: seconds to code a byte.
        read_s: seconds to read the code of a byte.
    """

    parts: int = 1
    slower: float = 1.0
    sent: float = 1.0
    code_s: float = 0.0
    read_s: float = 0.0


WHOLE = RowPassage()


def step_of(
    stations: Sequence[StationUses], cluster: Cluster, passage: RowPassage = WHOLE
) -> tuple[float, float]:
    """Return the seconds of forward and of backward, waits included.

    Args:
        stations: in the order of forward.
        cluster: the ranks.
        passage: the way of rows through them.
    """
    parts, micro_batches = passage.parts, cluster.size * passage.parts
    part, message_s = cluster.turn / parts, _message_s(cluster)
    before = [0.0, *(station.before_bytes / parts for station in stations[1:]), 0.0]

    def work(station: StationUses, seconds: float, come: float, go: float) -> StationWork:
        seconds = seconds * passage.slower * part + come * passage.read_s + go * passage.code_s
        seconds += _MESSAGES * message_s * ((come > 0) + (go > 0))
        return StationWork(station.rank, seconds, go * passage.sent)

    ends = [*zip(stations, pairwise(before), strict=True)]
    there = [work(each, each.forward_s, come, go) for each, (come, go) in ends]
    back = [
        work(each, each.backward_s + parts * _added_s(each, cluster, parts), come, go)
        for each, (go, come) in ends
    ]
    dealt_s = _input_bytes(stations) * (cluster.size - 1) / cluster.link.bytes_per_s
    meeting_s = cluster.moves.wall.round_s if cluster.moves else 0.0
    return (
        dealt_s + _FORWARD_MEETINGS * meeting_s + passage_s(there, micro_batches, cluster),
        _BACKWARD_MEETINGS * meeting_s + passage_s(back[::-1], micro_batches, cluster),
    )


def _message_s(cluster: Cluster) -> float:
    """Return a processor's seconds for a message that a rank sends or receives."""
    if cluster.moves is None or cluster.size == 1:
        return 0.0
    in_round = 2 * (cluster.size - 1)  # messages that a move among all ranks sends and receives
    return cluster.moves.cpu.round_s / in_round


def _added_s(station: StationUses, cluster: Cluster, parts: int) -> float:
    """Return the seconds by which one micro-batch's gradients lengthen a station's backward.

    They are added to those of the micro-batch before. Where a rank's rows go in parts, each part
    writes gradients of its own; one writing is in the profile of the rank's rows.
    """
    passes = _SUM_PASSES + (parts - 1) / parts
    return station.pace * station.gradient_bytes * cluster.pack_byte_s * passes


def least_s(
    stations: Sequence[StationUses], cluster: Cluster, passage: RowPassage = WHOLE
) -> float:
    """Return about the seconds that a step takes at least: the first micro-batch, then the others
    at the pace of the busiest rank or link.
    """
    busy: dict[int, float] = defaultdict(float)
    for station in stations:
        busy[station.rank] += (station.forward_s + station.backward_s) * cluster.turn
    byte_s = 2 * passage.sent / cluster.link.bytes_per_s
    crossing_s = [station.before_bytes * byte_s for station in stations]
    first_s, all_s = sum(busy.values()), sum(busy.values()) * cluster.size
    slowest_s = max(*busy.values(), *crossing_s)
    micro_batches = cluster.size * passage.parts
    waits_s = first_s + sum(crossing_s) + (micro_batches - 1) * slowest_s
    piped_s = waits_s / passage.parts
    if cluster.steady:
        return piped_s
    return max(piped_s, all_s / (cluster.cores_per_rank * cluster.size))


def traffic_of(
    stations: Sequence[StationUses], ranks: int, passage: RowPassage = WHOLE, rows: int = 0
) -> Traffic:
    """Return the bytes that cross in forward, for the rows of all ranks; as many come back.

    Args:
        stations: in the order of forward.
        ranks: number of ranks.
        passage: the way of rows through them.
        rows: number of ranks that bring rows, if some bring none.
    """
    sent, received = [0.0] * ranks, [0.0] * ranks
    for one, other in pairwise(stations):
        nbytes = other.before_bytes * passage.sent * (rows or ranks)
        sent[one.rank] += nbytes
        received[other.rank] += nbytes
    return Traffic(tuple(sent), tuple(received), rounds=0)


def _input_bytes(stations: Sequence[StationUses]) -> float:
    """Return the bytes of inputs that go to the rank which needs most, from each other rank."""
    needed: dict[int, dict[int, float]] = {}
    for station in stations:
        for use in station.uses:
            needed.setdefault(station.rank, {}).update(use.inputs)
    return max(sum(inputs.values()) for inputs in needed.values())


@dataclass(frozen=True)
class StationWork:
    """Work of one station for one micro-batch.

    Args:
        rank: the rank that holds it.
        seconds: seconds of compute on a whole core.
        crossing_bytes: bytes that go on to the next station.
    """

    rank: int
    seconds: float
    crossing_bytes: float = 0.0


def passage_s(stations: Sequence[StationWork], micro_batches: int, cluster: Cluster) -> float:
    """Return the seconds until all micro-batches are through all stations.

    Examples:
        >>> import shoal
        >>> hosts = shoal.Topology(("one", "other"))
        >>> cluster = shoal.Cluster(hosts, shoal.Link(latency_s=0.0, bytes_per_s=125e6))
        >>> passage_s([StationWork(0, 1.0), StationWork(1, 1.0)], 2, cluster)
        3.0
    """
    return _Passage(stations, micro_batches, cluster).run()


@final
class _Passage:
    def __init__(
        self, stations: Sequence[StationWork], micro_batches: int, cluster: Cluster
    ) -> None:
        self._stations, self._cluster = stations, cluster
        # ranks that take turns on shared cores have a whole one while few compute
        self._cores = inf if cluster.steady else cluster.cores_per_rank * cluster.size
        ranks = {station.rank for station in stations}
        self._left = {
            rank: [
                (number, micro)
                for number, station in enumerate(stations)
                for micro in range(micro_batches)
                if station.rank == rank
            ][::-1]
            for rank in ranks
        }
        self._arrives = {(0, micro): 0.0 for micro in range(micro_batches)}
        self._coming: list[float] = []  # moments of arrivals to come, a heap
        # the moment from which a rank's link is free, out and in
        self._out, self._into = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)

    def run(self) -> float:
        """Return the end of the last task."""
        now, running = 0.0, dict[int, float]()  # seconds that are left of each rank's task
        while any(self._left.values()):
            for rank, left in self._left.items():
                if left and rank not in running and self._arrives.get(left[-1], inf) <= now:
                    running[rank] = self._stations[left[-1][0]].seconds
            speed = min(1.0, self._cores / max(1, len(running)))
            least = min(running.values(), default=inf)
            while self._coming and self._coming[0] <= now:
                heappop(self._coming)
            comes = self._coming[0] if self._coming else inf
            assert min(least, comes) < inf, "each task waits for an earlier one"
            if now + least / speed <= comes:
                done, now = least, now + least / speed
            else:
                done, now = (comes - now) * speed, comes
            for rank in [*running]:
                running[rank] -= done
                if running[rank] <= _ROUNDING:
                    del running[rank]
                    self._send_results(rank, *self._left[rank].pop(), now)
        return now

    def _send_results(self, rank: int, number: int, micro: int, now: float) -> None:
        """Let the results of a task go to the next station."""
        if number + 1 == len(self._stations):
            return
        station, to = self._stations[number], self._stations[number + 1].rank
        arrives = now
        hosts = self._cluster.topology.hosts + self._cluster.tail
        if to != rank and hosts[to] != hosts[rank]:
            link = self._cluster.link
            begins = max(now, self._out[rank], self._into[to])
            sent = begins + station.crossing_bytes / link.bytes_per_s
            self._out[rank] = self._into[to] = sent
            arrives = sent + _MESSAGES * link.latency_s
        self._arrives[number + 1, micro] = arrives
        heappush(self._coming, arrives)


_MESSAGES = 2  # flags that tell the values with a gradient, then the values
# meetings of all ranks: forms of a call, inputs, use of an output, targets, losses; then slopes
_FORWARD_MEETINGS, _BACKWARD_MEETINGS = 5, 1
_SUM_PASSES = 1.5  # a sum reads two tensors and writes one; packing reads one and writes one
_ROUNDING = 1e-9  # seconds
