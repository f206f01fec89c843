"""Survey of an examination: the results of all hosts as plain data, which the checks judge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal_tools.doctor.facts import Host


@dataclass(frozen=True)
class Attempt:
    """Attempt to reach a host at one of its addresses."""

    host: str  # the other host's id
    address: str
    outcome: str  # "" if the host is there, or the failure (wire.py)
    source: str  # the own address that leads there
    port: int = 0


@dataclass(frozen=True)
class Reached:
    """Contacts of one host with the others."""

    attempts: tuple[Attempt, ...] = ()
    heard: tuple[str, ...] = ()  # ids of hosts from which datagrams came
    # ids of hosts with requests that came, though our answers did not arrive
    asked: tuple[str, ...] = ()
    # addresses of the other hosts' names, as resolved here
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Path:
    """Way from one host to another, as the first host measures it."""

    host: str  # the other host's id
    address: str
    latency_s: float  # seconds there and back
    ahead_s: float  # seconds by which its clock is ahead
    passes: int | None  # the largest packet that passes; None if all pass
    passes_back: int | None


@dataclass(frozen=True)
class Paths:
    """Ways from one host."""

    paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Rate:
    """Rate of a connection from one host to another."""

    sender: str
    receiver: str
    bytes_per_s: float


@dataclass(frozen=True)
class Rates:
    """Rates that one host has measured."""

    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True)
class Survey:
    """Results of an examination, from all hosts that took part."""

    me: str  # the host that keeps this object
    hosts: tuple[Host, ...]  # hosts in the order of ranks
    reached: dict[str, Reached] = field(default_factory=dict)  # results by host
    paths: dict[str, Paths] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # bytes a second, by sender and receiver
    # hosts that went silent, with the last key that was missing
    lost: dict[str, str] = field(default_factory=dict)
    size: int = 1  # number of expected hosts
    expected_bytes_per_s: float = 0.0  # expected rate of every link

    def host(self, id: str) -> Host:
        """Return the host of that id (KeyError if there is none)."""
        for host in self.hosts:
            if host.id == id:
                return host
        raise KeyError(id)

    def pairs(self) -> Iterator[tuple[Host, Host]]:
        """Yield every host with every other one, both ways."""
        for sender in self.hosts:
            for receiver in self.hosts:
                if sender is not receiver:
                    yield sender, receiver

    def attempts(self, sender: Host, receiver: Host) -> tuple[Attempt, ...]:
        """Return the attempts of one host to reach another; none if it did not report."""
        reached = self.reached.get(sender.id, Reached())
        return tuple(each for each in reached.attempts if each.host == receiver.id)

    def way(self, sender: Host, receiver: Host) -> Attempt | None:
        """Return the attempt by which one host reaches another, if it does."""
        attempts = self.attempts(sender, receiver)
        return next((attempt for attempt in attempts if not attempt.outcome), None)

    def path(self, sender: Host, receiver: Host) -> Path | None:
        """Return the way from one host to another, as the first has measured it."""
        paths = self.paths.get(sender.id, Paths()).paths
        return next((path for path in paths if path.host == receiver.id), None)
