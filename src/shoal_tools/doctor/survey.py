"""All that the hosts of an examination have found, as plain data: what the checks judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal_tools.doctor.facts import Host


@dataclass(frozen=True)
class Attempt:
    """One attempt to reach a host at one of its addresses."""

    host: str  # its id
    address: str
    outcome: str  # "" where it is there, or how it failed (wire.py)
    source: str  # the own address that leads there
    port: int = 0


@dataclass(frozen=True)
class Reached:
    """What one host has seen of the others."""

    attempts: tuple[Attempt, ...] = ()
    heard: tuple[str, ...] = ()  # ids of hosts whose datagrams came
    asked: tuple[str, ...] = ()  # ids of hosts whose requests came, and not our answers
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # theirs, as resolved here


@dataclass(frozen=True)
class Path:
    """The way from one host to another, as the first measures it."""

    host: str  # the other's id
    address: str
    latency_s: float  # there and back
    ahead_s: float  # how far its clock is ahead
    passes: int | None  # the largest packet that passes; None where all do
    passes_back: int | None


@dataclass(frozen=True)
class Paths:
    """The ways from one host."""

    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Rate:
    """What a connection from one host to another carries."""

    sender: str
    receiver: str
    bytes_per_s: float


@dataclass(frozen=True)
class Rates:
    """What one host has measured."""

    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What was found, on all hosts that took part."""

    me: str  # the host that keeps this
    hosts: tuple[Host, ...]  # in the order of ranks
    reached: dict[str, Reached] = field(default_factory=dict)  # by host
    paths: dict[str, Paths] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # bytes/s, by sender, receiver
    lost: dict[str, str] = field(default_factory=dict)  # hosts that went silent, and when
    size: int = 1  # hosts that were to come
    expected_bytes_per_s: float = 0.0  # of every link

    def host(self, id: str) -> Host:
        """The host of that id (KeyError if there is none)."""
        for host in self.hosts:
            if host.id == id:
                return host
        raise KeyError(id)

    def pairs(self) -> Iterator[tuple[Host, Host]]:
        """Every host with every other one, both ways."""
        for sender in self.hosts:
            for receiver in self.hosts:
                if sender is not receiver:
                    yield sender, receiver

    def attempts(self, sender: Host, receiver: Host) -> tuple[Attempt, ...]:
        """How one host tried to reach another; none where it did not tell."""
        reached = self.reached.get(sender.id, Reached())
        return tuple(each for each in reached.attempts if each.host == receiver.id)

    def way(self, sender: Host, receiver: Host) -> Attempt | None:
        """How one host reaches another, if it does."""
        attempts = self.attempts(sender, receiver)
        return next((attempt for attempt in attempts if not attempt.outcome), None)

    def path(self, sender: Host, receiver: Host) -> Path | None:
        """The way from one host to another, as the first has measured it."""
        paths = self.paths.get(sender.id, Paths()).paths
        return next((path for path in paths if path.host == receiver.id), None)
