"""Costs as data: what a site sends at each moment of a step, and what that takes.

    forward     ┄┄│ in_forward │ layer │┄┄     the main thread sends it and waits (Wait.AT_ONCE)
    backward    ┄┄│ layer │ in_backward │┄┄    likewise; or a lane sends it meanwhile
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
    """What one exchange moves: bytes `sent[rank]`, `received[rank]`, in `rounds` messages in a row.

    `leaving[rank]` is how much of what is sent goes to other hosts; None says all of it, as where
    hosts have one rank. `rounds` is whole, but for the mean of a step.
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
        """What one of two equal halves moves, in half of the rounds."""
        return replace(self.scaled(0.5), rounds=self.rounds // 2)

    def scaled(self, part: float) -> Traffic:
        """A part of the bytes, in as many rounds."""
        return Traffic(
            tuple(nbytes * part for nbytes in self.sent),
            tuple(nbytes * part for nbytes in self.received),
            self.rounds,
            self.leaving and tuple(nbytes * part for nbytes in self.leaving),
        )

    def one_way(self, workers: int) -> tuple[Traffic, Traffic]:
        """The two halves of an exchange between workers and the servers behind them.

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
    """What several exchanges move, rank by rank; one among fewer ranks adds nothing elsewhere."""
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
        """Seconds that this traffic takes."""
        return traffic.rounds * self.round_s + traffic.worst * self.byte_s


@dataclass(frozen=True)
class Pace:
    """How an exchange does on one cluster, with as many buckets in flight as training has."""

    wall: Price  # seconds on link and lane
    cpu: Price  # seconds of one rank's processor


@dataclass(frozen=True)
class CodingPace:
    """What a codec does to values of four bytes on a rank's processor, with all ranks at it.

    Seconds a value, and of each piece: a run of a slice, or a matrix that has terms. Unmeasured,
    they are those of about 2 GB/s.
    """

    encode_s: float = 2e-9  # what it loses is kept meanwhile
    decode_s: float = 2e-9
    # of terms that an exchange adds: to make them, keeping what they lose, and to read their sums
    terms_s: float = 2e-9
    sums_s: float = 2e-9
    encode_piece_s: float = 0.0
    decode_piece_s: float = 0.0
    terms_piece_s: float = 0.0
    sums_piece_s: float = 0.0


class Direction(IntEnum):
    """What a phase takes of a rank's link."""

    OUT = 1
    IN = 2
    BOTH = 3


class Wait(Enum):
    """Who waits until a phase is over."""

    AT_ONCE = "at once"  # the main thread, which sends it itself
    # a lane sends it; gradients are waited for by the optimizer's step, parameters by the layer's
    # next forward
    WHEN_NEEDED = "when needed"
    NEVER = "never"  # a lane sends it


@dataclass(frozen=True)
class Phase:
    """What a site sends at one moment of a step, and what is computed around that.

    Args:
        traffic: bytes of each rank.
        pace: of what moves them.
        wait: who waits for it.
        direction: of the link that it takes.
        before_s: seconds that its lane computes first, as to encode.
        after_s: seconds that its lane computes then, as to decode.
        beside_s: seconds of the layer's own compute beside what the main thread waits for: the
            first of its forward, the last of its backward.
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
        """Seconds of link and lane, were nothing else there."""
        return self.pace.wall.of(self.traffic) + self.lane_s

    @property
    def lane_s(self) -> float:
        """Seconds that its lane computes."""
        return self.before_s + self.after_s

    @property
    def mean(self) -> Phase:
        """What a step has of it on average."""
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
    """Who updates a site's parameters: which part of them."""

    main: float = 1.0  # every rank, in optimizer.step()
    lane: float = 0.0  # the busiest owner, on its lane, before the phase after the step
    pieces: int = 0  # of parameters, that such an owner has
    host: float = 0.0  # one of the hosts that do not train; the layer's next forward waits for it


@dataclass(frozen=True)
class Cost:
    """What serving a site costs one rank in one step.

    Args:
        in_forward: what is sent when the layer is called.
        in_backward: what is sent when the site's gradients are there.
        after_step: what is sent from the optimizer's step on.
        forward_s: what the strategy changes in the layer's own forward, in seconds. It is negative
            where it leaves work out.
        backward_s: the same of its backward.
        memory_bytes: extra memory of a rank.
        held: the part of the parameters that a rank has.
        update: who updates them.
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
        """Those that there are, in the order of a step."""
        phases = (self.in_forward, self.in_backward, self.after_step)
        return tuple(phase for phase in phases if phase is not None)

    @cached_property
    def traffic(self) -> Traffic:
        """What all phases move together."""
        return total(phase.traffic for phase in self.phases)

    @cached_property
    def on_main_thread(self) -> bool:
        """Whether the main thread itself sends something."""
        return any(phase.wait is Wait.AT_ONCE for phase in self.phases)

    @cached_property
    def alone_s(self) -> float:
        """Seconds of link and lane, were the site alone and nothing hidden."""
        return sum(phase.alone_s for phase in self.phases)

    @property
    def lane_s(self) -> float:
        """Seconds that lanes compute."""
        return sum(phase.lane_s for phase in self.phases)

    @property
    def processor_s(self) -> float:
        """Seconds of a rank's processor for the traffic, whichever way it goes."""
        by_pace: dict[Pace, list[Traffic]] = defaultdict(list)
        for phase in self.phases:
            by_pace[phase.pace].append(phase.traffic)
        return sum(pace.cpu.of(total(traffics)) for pace, traffics in by_pace.items())

    @property
    def beside_s(self) -> float:
        """Seconds of the layer's own compute beside what the main thread waits for."""
        return sum(phase.beside_s for phase in self.phases)

    def each(self, every: int) -> Cost:
        """The same of a site that sends once in so many steps."""
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
        """The same of an average step, where some phases do not go in each."""
        if all(phase.every == 1 for phase in self.phases):
            return self
        return replace(
            self,
            in_forward=self.in_forward and self.in_forward.mean,
            in_backward=self.in_backward and self.in_backward.mean,
            after_step=self.after_step and self.after_step.mean,
        )
