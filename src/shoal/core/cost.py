"""Costs as data: the bytes that a site sends at each moment of a step, and their time.

    forward     ┄┄│ in_forward │ layer │┄┄     the main thread sends it and waits (Wait.AT_ONCE)
    backward    ┄┄│ layer │ in_backward │┄┄    the same; or a lane sends it meanwhile
    optimizer   ┄┄│ after_step ┄┄              a lane; the layer's next forward may wait for it

A phase on a lane is one job:  │ before_s │ traffic at its pace │ after_s │
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property
from itertools import zip_longest


@dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange: `sent[rank]`, `received[rank]`, in `rounds` messages in a row.

    `leaving[rank]` is the part of the sent bytes that goes to other hosts. None says all of it, as
    if each host has one rank. `rounds` is a whole number, except for the mean of a step.
    """

    sent: tuple[float, ...]
    received: tuple[float, ...]
    rounds: float
    leaving: tuple[float, ...] | None = None

    @cached_property
    def worst(self) -> float:
        """Bytes through the busiest direction of the busiest rank: the link's work."""
        return max((*self.sent, *self.received), default=0.0)

    @property
    def half(self) -> Traffic:
        """Traffic of one of two equal halves, in half of the rounds."""
        return replace(self.scaled(0.5), rounds=self.rounds // 2)

    def scaled(self, part: float) -> Traffic:
        """Return a part of the bytes, in as many rounds."""
        return Traffic(
            tuple(nbytes * part for nbytes in self.sent),
            tuple(nbytes * part for nbytes in self.received),
            self.rounds,
            self.leaving and tuple(nbytes * part for nbytes in self.leaving),
        )

    def one_way(self, workers: int) -> tuple[Traffic, Traffic]:
        """Return the two halves of an exchange between workers and the servers after them.

        In the first, bytes leave workers and reach servers; in the second they come back.
        """
        servers = len(self.sent) - workers
        of_workers, of_servers = (1,) * workers + (0,) * servers, (0,) * workers + (1,) * servers
        return self._between(of_workers, of_servers), self._between(of_servers, of_workers)

    def _between(self, senders: Sequence[int], receivers: Sequence[int]) -> Traffic:
        def of(rows: Sequence[float], ranks: Sequence[int]) -> tuple[float, ...]:
            return tuple(nbytes * factor for nbytes, factor in zip(rows, ranks, strict=True))

        leaving = self.leaving and of(self.leaving, senders)
        return Traffic(
            of(self.sent, senders), of(self.received, receivers), self.rounds // 2, leaving
        )


def total(traffics: Iterable[Traffic]) -> Traffic:
    """Add up several exchanges, rank by rank.

    An exchange among fewer ranks adds nothing to the others.
    """
    traffics = tuple(traffics)

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
    """Seconds of traffic: `round_s` a message, `byte_s` a byte of the worst rank."""

    round_s: float
    byte_s: float

    def of(self, traffic: Traffic) -> float:
        """Return the seconds that this traffic takes."""
        return traffic.rounds * self.round_s + traffic.worst * self.byte_s


@dataclass(frozen=True)
class Pace:
    """Speed of an exchange on one cluster, with as many buckets in flight as in training."""

    wall: Price  # seconds on link and lane
    cpu: Price  # seconds of one rank's processor


@dataclass(frozen=True)
class CodingPace:
    """Speed of a codec on a rank's processor, for values of four bytes, while all ranks use it.

    The seconds are for one value, and for each piece: a run of a slice, or a matrix that has terms.
    The defaults, for a codec that was not measured, stand for about 2 GB/s.
    """

    encode_s: float = 2e-9  # includes the time to keep the rounding error
    decode_s: float = 2e-9
    # seconds for terms that an exchange adds: to make them and keep the error, and to read their
    # sums
    terms_s: float = 2e-9
    sums_s: float = 2e-9
    encode_piece_s: float = 0.0
    decode_piece_s: float = 0.0
    terms_piece_s: float = 0.0
    sums_piece_s: float = 0.0


class Direction(IntEnum):
    """Directions of a rank's link that a phase uses."""

    OUT = 1
    IN = 2
    BOTH = 3


class Wait(Enum):
    """Time until which a phase is waited for."""

    AT_ONCE = "at once"  # the main thread sends it and waits
    # a lane sends it; the optimizer's step waits for gradients, the layer's next forward for
    # parameters
    WHEN_NEEDED = "when needed"
    NEVER = "never"  # a lane sends it, and nothing waits


@dataclass(frozen=True)
class Phase:
    """Phase of a step: the bytes that a site sends at one moment, and the computing around them.

    Args:
        traffic: bytes of each rank.
        pace: speed of the exchange.
        wait: the time until which it is waited for.
        direction: directions of the link that it uses.
        before_s: seconds that its lane computes before it sends, e.g. to encode.
        after_s: seconds that its lane computes afterwards, e.g. to decode.
        beside_s: seconds of the layer's own compute while the main thread would wait: the first of
            its forward, the last of its backward.
        shown: the part of the bytes that can be waited for. The rest crosses within the seconds
            that `Cost` states for the layer.
        every: steps from one such phase to the next.
    """

    traffic: Traffic
    pace: Pace
    wait: Wait = Wait.WHEN_NEEDED
    direction: Direction = Direction.BOTH
    before_s: float = 0.0
    after_s: float = 0.0
    beside_s: float = 0.0
    shown: float = 1.0
    every: int = 1

    @cached_property
    def alone_s(self) -> float:
        """Seconds of link and lane, if nothing else ran."""
        return self.pace.wall.of(self.traffic) + self.lane_s

    @property
    def lane_s(self) -> float:
        """Seconds that its lane computes."""
        return self.before_s + self.after_s

    @property
    def mean(self) -> Phase:
        """Average share of the phase in one step."""
        if self.every == 1:
            return self
        traffic = self.traffic.scaled(1 / self.every)
        return replace(
            self,
            traffic=replace(traffic, rounds=self.traffic.rounds / self.every),
            before_s=self.before_s / self.every,
            after_s=self.after_s / self.every,
            beside_s=self.beside_s / self.every,
            every=1,
        )


@dataclass(frozen=True)
class Update:
    """Parts of a site's parameters, by the place where they are updated."""

    main: float = 1.0  # part updated by every rank, in optimizer.step()
    # part updated by the busiest owner, on its lane, before the phase after the step
    lane: float = 0.0
    pieces: int = 0  # number of pieces of parameters that such an owner has
    # part updated by one of the hosts that do not train; the layer's next forward waits for it
    host: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Cost of a site for one rank in one step.

    Args:
        in_forward: the phase when the layer is called.
        in_backward: the phase when the site's gradients are there.
        after_step: the phase from the optimizer's step on.
        forward_s: seconds that the strategy adds to the layer's own forward. The number is negative
            if it saves work.
        backward_s: seconds that it adds to the layer's own backward.
        memory_bytes: extra memory of a rank.
        held: the part of the parameters that a rank has.
        update: the places where parameters are updated.
    """

    in_forward: Phase | None = None
    in_backward: Phase | None = None
    after_step: Phase | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    memory_bytes: float = 0.0
    held: float = 1.0
    update: Update = Update()

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the site, in the order of a step."""
        phases = (self.in_forward, self.in_backward, self.after_step)
        return tuple(phase for phase in phases if phase is not None)

    @cached_property
    def traffic(self) -> Traffic:
        """Traffic of all phases together."""
        return total(phase.traffic for phase in self.phases)

    @cached_property
    def on_main_thread(self) -> bool:
        """Whether the main thread itself sends something."""
        return any(phase.wait is Wait.AT_ONCE for phase in self.phases)

    @cached_property
    def alone_s(self) -> float:
        """Seconds of link and lane, if the site were alone and nothing hidden."""
        return sum(phase.alone_s for phase in self.phases)

    @property
    def lane_s(self) -> float:
        """Seconds that lanes compute."""
        return sum(phase.lane_s for phase in self.phases)

    @property
    def processor_s(self) -> float:
        """Seconds of a rank's processor for the traffic, whatever its direction."""
        by_pace: dict[Pace, list[Traffic]] = defaultdict(list)
        for phase in self.phases:
            by_pace[phase.pace].append(phase.traffic)
        return sum(pace.cpu.of(total(traffics)) for pace, traffics in by_pace.items())

    @property
    def beside_s(self) -> float:
        """Seconds of the layer's own compute while the main thread would wait."""
        return sum(phase.beside_s for phase in self.phases)

    def each(self, every: int) -> Cost:
        """Return the cost of the site if it sends once in so many steps."""
        if every == 1:
            return self

        def seldom(phase: Phase | None) -> Phase | None:
            return phase and replace(phase, every=phase.every * every)

        return replace(
            self,
            in_forward=seldom(self.in_forward),
            in_backward=seldom(self.in_backward),
            after_step=seldom(self.after_step),
        )

    @property
    def mean(self) -> Cost:
        """Cost of an average step, if some phases do not happen in each."""
        if all(phase.every == 1 for phase in self.phases):
            return self
        return replace(
            self,
            in_forward=self.in_forward and self.in_forward.mean,
            in_backward=self.in_backward and self.in_backward.mean,
            after_step=self.after_step and self.after_step.mean,
        )
