"""Costs as data: bytes that each rank sends, what they are priced at, and seconds that a site adds
to a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest


@dataclass(frozen=True)
class Traffic:
    """What one exchange moves: `sent[rank]` and `received[rank]` in bytes, and the messages that
    follow one another.

    `leaving[rank]` is how much of what is sent goes to other hosts; None says all of it, as where
    hosts have one rank.
    """

    sent: tuple[float, ...]
    received: tuple[float, ...]
    rounds: int
    leaving: tuple[float, ...] | None = None

    @cached_property
    def worst(self) -> float:
        """Bytes through the busiest direction of the busiest rank: the link's work."""
        return max((*self.sent, *self.received), default=0.0)

    @cached_property
    def half(self) -> Traffic:
        """What one of two equal halves moves."""
        leaving = None if self.leaving is None else tuple(n / 2 for n in self.leaving)
        return Traffic(
            tuple(n / 2 for n in self.sent),
            tuple(n / 2 for n in self.received),
            self.rounds // 2,
            leaving,
        )

    @cached_property
    def one_way(self) -> Traffic:
        """What goes in one direction where one half goes only there, and the other only back."""
        return replace(self, rounds=self.rounds // 2)


def total(traffics: Sequence[Traffic]) -> Traffic:
    """What several exchanges move together, rank by rank; of those among fewer ranks the others
    move nothing.
    """

    def summed(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(map(sum, zip_longest(*rows, fillvalue=0.0)))

    return Traffic(
        sent=summed(t.sent for t in traffics),
        received=summed(t.received for t in traffics),
        rounds=sum(t.rounds for t in traffics),
        leaving=summed(t.leaving or t.sent for t in traffics),
    )


@dataclass(frozen=True)
class Price:
    """Seconds of traffic: `round_s` for each message that follows another, `byte_s` for each byte
    of the worst rank.
    """

    round_s: float
    byte_s: float

    def of(self, traffic: Traffic) -> float:
        """Seconds that this traffic takes."""
        return traffic.rounds * self.round_s + traffic.worst * self.byte_s


@dataclass(frozen=True)
class Pace:
    """How an exchange does on one cluster, with as many buckets in flight as training has."""

    wall: Price  # seconds on link and lane
    cpu: Price  # seconds of one rank's processor


@dataclass(frozen=True)
class Cost:
    """What serving a site costs one rank in one step.

    `forward_s` and `backward_s` are what the strategy changes in the layer's own (negative where it
    leaves work out), `lane_s` is compute that runs beside backward, after the site's bytes have
    come; `memory_bytes` is extra memory. `owned`: the part of the site that its busiest owner
    updates, 0 where it has no owners; where it has, half of the traffic (of servers' all of it once
    more, the other way), and `lane_s`, come after optimizer.step(). `awaited` is the traffic again
    where it is no lane's, but the main thread waits for it, in forward and in backward; `beside` it
    the layer computes for so long, the first seconds of its forward and the last of its backward.
    `held` is the part of the parameters that a rank has; `elsewhere` what one of others updates
    meanwhile, whom the layer's next forward waits for.
    """

    traffic: Traffic
    pace: Pace  # of the exchange that moves it
    forward_s: float = 0.0
    backward_s: float = 0.0
    lane_s: float = 0.0
    memory_bytes: float = 0.0
    owned: float = 0.0
    awaited: tuple[Traffic, Traffic] | None = None
    beside: tuple[float, float] = (0.0, 0.0)
    held: float = 1.0
    elsewhere: float = 0.0
