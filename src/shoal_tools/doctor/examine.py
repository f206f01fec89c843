"""Course of an examination. Every host goes through it at once, and it ends whatever happens.

    1  reach     connect to each address of each host; knock with datagrams
    2  paths     latency, clocks, and whether full packets pass, both ways
    3  rates     hosts in pairs, as in a tournament, so that no link is measured twice at a time
    4  again     pairs that seem slow: a busy host may have been the reason

After each part all hosts learn the others' results, so all come to the same findings.

Cost: 0.8 s for each round of the tournament, at most 8 s in all, and as many rounds as hosts. It
takes about 2.5 s more if a host cannot be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import final

from shoal_tools.doctor.boards import Circle
from shoal_tools.doctor.checks_network import slow_pairs
from shoal_tools.doctor.deadline import all_within
from shoal_tools.doctor.facts import Host, resolved
from shoal_tools.doctor.meet import Met
from shoal_tools.doctor.ports import asking
from shoal_tools.doctor.survey import Attempt, Path, Paths, Rate, Rates, Reached, Survey
from shoal_tools.doctor.wire import TIMEOUT_S, Door, largest, latency, rate, reach

_LOOK_S = 0.2
_SLACK_S = 4.0  # seconds by which hosts may be late
_PATH_S = 12.0
_RATE_S, _ALL_RATES_S = 0.4, 8.0
_AGAIN = 2  # number of repetitions


def examine(met: Met, secret: str, expected_bytes_per_s: float) -> Survey:
    """Let the hosts that have met examine each other. Return the results.

    Args:
        met: the hosts.
        secret: the secret that proves requests.
        expected_bytes_per_s: expected rate of every link.
    """
    if met.circle is None:
        expected = expected_bytes_per_s
        return Survey(met.me.id, met.hosts, size=met.size, expected_bytes_per_s=expected)
    return Examination(met, met.circle, secret, expected_bytes_per_s).survey()


@final
class Examination:
    """Examination of hosts that have met, as one of them runs it."""

    def __init__(self, met: Met, circle: Circle, secret: str, expected_bytes_per_s: float) -> None:
        self.met, self.me, self.circle = met, met.me, circle
        self.secret = secret
        self.expected_bytes_per_s = expected_bytes_per_s
        self.others = [host for host in met.hosts if host.id != met.me.id]

    def survey(self) -> Survey:
        """Run all parts."""
        # 1  reach
        reached = self.circle.gather("reached", self._reach_others(), TIMEOUT_S + _SLACK_S)
        found = Survey(
            self.me.id,
            self.met.hosts,
            reached,
            lost=self.circle.lost,
            size=self.met.size,
            expected_bytes_per_s=self.expected_bytes_per_s,
        )
        # 2  paths
        found.paths.update(self.circle.gather("paths", self._paths(found), _PATH_S + _SLACK_S))
        # 3  rates
        rounds = list(tournament(self.met.hosts))
        seconds = min(_RATE_S, _ALL_RATES_S / 2 / max(1, len(rounds)))
        self._measure(found, rounds, seconds, "rates")
        # 4  again
        for number in range(_AGAIN):
            slow = slow_pairs(found)
            again = [[pair for pair in pairs if directions(*pair) & slow] for pairs in rounds]
            self._measure(found, list(filter(None, again)), seconds, f"again{number}")
        return found

    def _reach_others(self) -> Reached:
        """Connect to every other host, and note the hosts that knock."""
        self.met.responder.knock(
            [Door(a.text, other.port) for other in self.others for a in other.addresses]
        )
        with ThreadPoolExecutor(2) as threads:
            ended = threading.Event()
            requests = threads.submit(self._asking, ended)
            names = threads.submit(resolved, {other.name for other in self.others} - {self.me.name})
            work = {other.id: partial(self._attempts, other) for other in self.others}
            found = all_within(2 * TIMEOUT_S + 1.0, work)
            ended.set()
            attempts = tuple(attempt for each in found.values() for attempt in each)
            heard = tuple(self.met.responder.heard)
            return Reached(attempts, heard, requests.result(), names.result())

    def _asking(self, ended: threading.Event) -> tuple[str, ...]:
        """Return the hosts with requests for a connection that come, though our answers do not
        arrive.
        """
        addresses = set[str]()
        while not ended.wait(_LOOK_S):
            addresses |= asking(self.me.port)
        return tuple(
            other.id for other in self.others if addresses & {a.text for a in other.addresses}
        )

    def _attempts(self, other: Host) -> list[Attempt]:
        """Try the address that other hosts are told.

        If that fails, try all addresses of the host.
        """
        own = {address.text for address in self.me.addresses}

        def one(address: str) -> Attempt:
            door = Door(address, other.port)
            outcome, source = reach(door, other.id, secret=self.secret)
            return Attempt(other.id, address, outcome, source, other.port)

        told = [other.announced] if other.announced and other.announced not in own else []
        more = [a.text for a in other.outer if a.text not in own and a.text not in told]
        first = all_within(TIMEOUT_S + 0.2, {address: partial(one, address) for address in told})
        if any(not attempt.outcome for attempt in first.values()):
            return list(first.values())
        return [
            *first.values(),
            *all_within(TIMEOUT_S, {address: partial(one, address) for address in more}).values(),
        ]

    def _paths(self, found: Survey) -> Paths:
        """Measure the way to every host that this one reaches."""
        work = {
            other.id: partial(self._path, way)
            for other in self.others
            if (way := found.way(self.me, other)) is not None
        }
        return Paths(tuple(all_within(_PATH_S, work).values()))

    def _path(self, way: Attempt) -> Path:
        door = Door(way.address, way.port)
        trip_s, ahead_s = latency(door, self.secret)
        mtu = self.me.interfaces.mtus.get(self.me.interface_of(way.source), 1500)
        passes = largest(door, self.secret, outward=True, mtu=mtu)
        back = largest(door, self.secret, outward=False, mtu=mtu)
        return Path(way.host, way.address, trip_s, ahead_s, passes, back)

    def _measure(
        self, found: Survey, rounds: list[list[tuple[Host, Host]]], seconds: float, key: str
    ) -> None:
        """Measure pairs, round by round. The best of several measurements counts."""
        ways = {(sender.id, receiver.id) for sender, receiver in found.pairs()}
        for number, pairs in enumerate(rounds):
            own = [rate for pair in pairs for rate in self._rates_of(found, *pair, seconds)]
            timeout_s = 2 * seconds + 2 * TIMEOUT_S + _SLACK_S
            everyone = self.circle.gather(f"{key}{number}", Rates(tuple(own)), timeout_s)
            for each in (each for rates in everyone.values() for each in rates.rates):
                way = each.sender, each.receiver
                if way in ways:
                    found.rates[way] = max(each.bytes_per_s, found.rates.get(way, 0.0))

    def _rates_of(self, found: Survey, first: Host, second: Host, seconds: float) -> Iterator[Rate]:
        """Measure a pair on this host: both ways, if it is the one that reaches the other."""
        caller, called = first, second
        if found.way(caller, called) is None:
            caller, called = called, caller
        way, path = found.way(caller, called), found.path(caller, called)
        if caller is not self.me or way is None or path is None:
            return
        if path.passes is None and path.passes_back is None:  # otherwise a rate would mean nothing
            for outward in (True, False):
                sender, receiver = (caller, called) if outward else (called, caller)
                try:
                    measured = rate(Door(way.address, way.port), self.secret, outward, seconds)
                except OSError:
                    measured = 0.0
                yield Rate(sender.id, receiver.id, measured)


def tournament(hosts: Sequence[Host]) -> Iterator[list[tuple[Host, Host]]]:
    """Yield rounds in which every host meets one other, until all have met."""
    circle: list[Host | None] = [*hosts, *([None] * (len(hosts) % 2))]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(first, second) for first, second in pairs if first and second]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def directions(first: Host, second: Host) -> set[tuple[str, str]]:
    """Return both directions of a pair."""
    return {(first.id, second.id), (second.id, first.id)}
