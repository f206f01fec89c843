"""Prices of a pipeline: bytes, and seconds of forward and backward by a small simulation.

Each rank computes its stations in order, of each all micro-batches. Values that cross go out over
the link of their rank, in order. All forward, then all backward: the two are simulated alone.

Beside the layers' own seconds, each micro-batch costs a station the messages before and behind it,
and the sum of gradients that an earlier micro-batch has left. All ranks meet some times in a step.

With S even stations and M micro-batches on processors of their own, where nothing crosses, a
passage takes (M + S - 1) / M of the work of a rank: the bubble is (S - 1) / (M + S - 1).

Where hosts without rows hold the last layers, each rank computes the front for its own rows, part
by part. Parts go to the first host over its one link, and their gradients come back over it.

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


@dataclass(frozen=True)
class Front:
    """Layers before the first host that brings no rows: each rank computes them for its own rows.

    Args:
        forward_s: their seconds of forward.
        backward_s: their seconds of backward.
    """

    forward_s: float
    backward_s: float


def front_of(layers: Sequence[LayerProfile], holders: Mapping[str, int], rows: int) -> Front | None:
    """Return the front of layers that hosts without rows hold; None if ranks with rows hold some.

    Args:
        layers: the layers that are held.
        holders: the rank of each layer.
        rows: number of ranks that bring rows.
    """
    if min(holders[layer.name] for layer in layers) < rows:
        return None
    whole_s = layers[0].measured(UseFacts).backward_s
    ready_s = max(layer.ready_s for layer in layers)
    return Front(min(layer.needed_s for layer in layers), max(0.0, whole_s - ready_s))


def stations_at(
    layers: Sequence[LayerProfile], holders: Mapping[str, int], front: Front | None = None
) -> list[StationUses]:
    """Return the stations of a model's layers, by the rank that holds each."""
    groups = {layer.measured(UseFacts).with_layer or layer.name: layer for layer in layers}
    return stations_of(
        uses_of(layers, front.forward_s if front else 0.0),
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
    stations: Sequence[StationUses],
    cluster: Cluster,
    passage: RowPassage = WHOLE,
    front: Front | None = None,
) -> tuple[float, float]:
    """Return the seconds of forward and of backward, waits included.

    Args:
        stations: in the order of forward.
        cluster: the ranks.
        passage: the way of rows through them.
        front: layers before the stations, if each rank computes them for its own rows. Their
            seconds are not counted.
    """
    parts, micro_batches = passage.parts, cluster.size * passage.parts
    part, message_s = cluster.turn / parts, _message_s(cluster)
    before = [station.before_bytes / parts for station in stations]
    before = [before[0] if front else 0.0, *before[1:], 0.0]

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
    crossing_bytes = before[0] * passage.sent
    arrivals = _arrivals(front, there[0].rank, crossing_bytes, cluster, parts) if front else ()
    forward_s = passage_s(there, micro_batches, cluster, arrivals)
    backward_s = passage_s(back[::-1], micro_batches, cluster)
    if front:
        forward_s -= front.forward_s
        backward_s = _back_s(front, backward_s, crossing_bytes, cluster, parts)
    return (
        dealt_s + _FORWARD_MEETINGS * meeting_s + forward_s,
        _BACKWARD_MEETINGS * meeting_s + backward_s,
    )


def _arrivals(front: Front, first: int, nbytes: float, cluster: Cluster, parts: int) -> list[float]:
    """Return the moment at which each micro-batch of the front is at the first host.

    All ranks compute at once, and the host's link takes one micro-batch at a time.
    """
    hosts, free_s = cluster.topology.hosts + cluster.tail, 0.0
    found = [0.0] * (cluster.size * parts)
    for part in range(parts):
        ready_s = front.forward_s * (part + 1) / parts
        for rank in range(cluster.size):
            arrives_s = ready_s
            if hosts[rank] != hosts[first]:
                free_s = max(ready_s, free_s) + nbytes / cluster.link.bytes_per_s
                arrives_s = free_s + _MESSAGES * cluster.link.latency_s
            found[rank * parts + part] = arrives_s
    return found


def _back_s(front: Front, hosts_s: float, nbytes: float, cluster: Cluster, parts: int) -> float:
    """Return the seconds of backward at hosts and on the way back, without those of the front.

    The front's backward goes on with the parts of a rank that have come, while others come.
    """
    crossing_s = nbytes / cluster.link.bytes_per_s
    come_s = max(hosts_s, cluster.size * parts * crossing_s) + crossing_s
    beside_s = min(front.backward_s, come_s / cluster.size) * (parts - 1) / parts
    return come_s + _MESSAGES * cluster.link.latency_s - beside_s


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
        rows: number of ranks that bring rows, if some bring none. These compute what is before the
            first station, if that is on none of them.
    """
    sent, received = [0.0] * ranks, [0.0] * ranks
    if rows and stations[0].rank >= rows:
        nbytes = stations[0].before_bytes * passage.sent
        sent[:rows] = [nbytes] * rows
        received[stations[0].rank] += nbytes * rows
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


def passage_s(
    stations: Sequence[StationWork],
    micro_batches: int,
    cluster: Cluster,
    arrivals: Sequence[float] = (),
) -> float:
    """Return the seconds until all micro-batches are through all stations.

    Args:
        stations: in the order in which micro-batches come to them.
        micro_batches: number of micro-batches.
        cluster: the ranks.
        arrivals: moments at which micro-batches come to the first station; () means 0.

    Examples:
        >>> import shoal
        >>> hosts = shoal.Topology(("one", "other"))
        >>> cluster = shoal.Cluster(hosts, shoal.Link(latency_s=0.0, bytes_per_s=125e6))
        >>> passage_s([StationWork(0, 1.0), StationWork(1, 1.0)], 2, cluster)
        3.0
    """
    return _Passage(stations, arrivals or (0.0,) * micro_batches, cluster).run()


@final
class _Passage:
    def __init__(
        self, stations: Sequence[StationWork], arrivals: Sequence[float], cluster: Cluster
    ) -> None:
        self._stations, self._cluster = stations, cluster
        # ranks that take turns on shared cores have a whole one while few compute
        self._cores = inf if cluster.steady else cluster.cores_per_rank * cluster.size
        ranks = {station.rank for station in stations}
        self._left = {
            rank: [
                (number, micro)
                for number, station in enumerate(stations)
                for micro in range(len(arrivals))
                if station.rank == rank
            ][::-1]
            for rank in ranks
        }
        self._arrives = {(0, micro): moment for micro, moment in enumerate(arrivals)}
        self._coming = sorted(arrivals)  # moments of arrivals to come, a heap
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
