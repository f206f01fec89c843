"""One step as the planner sees it: the traffic of a plan's sites, and the compute that hides it.

One rank's main thread computes. Its lanes send sites in the plan's order and share one link:

    backward   |── layer 9 ──|── layer 8 ──|─────── layer 7 ───────|
    lane 0                   |▒▒ send 9 ▒▒|== multiply ==|              1
    lane 1                                 |·waits·|▒▒ send 8, 7 ▒▒▒|   2
    step = forward + waited + max(backward, last lane) + optimizer      3

1  A job of a lane is its phase's compute and traffic (core/cost.py).
2  A site is sent when its last layer's gradient is there, and all sites before it have been sent.
3  The optimizer waits for the sites with a backward phase that says so (`Wait.WHEN_NEEDED`).

If a site has owners, no thread waits for its gradients. The rest follows after the step:

    forward    |─ 1 ─|─ 2 ─|┄┄ waited ┄┄|── 3 ──|                       5
    lanes      |= update 1 =|▒▒ back 1 ▒▒|▒▒▒ back 3 ▒▒▒|               4

4  Owners update and send back on the site's lane, last site first. Servers first send back the
   sites that were late.
5  The next forward waits layer by layer. It counts as this step's own: a steady state.

    forward    |─ 1 ─|┄┄ rows ┄┄|─ 2, cut ─|┄┄                          6

6  The main thread itself sends phases of `Wait.AT_ONCE`, such as the rows of cut layers. It
   computes during some of it, and waits for the rest on the link that it shares with the lanes.

Hidden traffic costs nothing until link or processor is full (lanes.py).
Equations: docs/ideas/how-it-chooses.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import inf
from typing import final

from shoal.core.cost import Cost, Direction, Phase, Traffic, Update, Wait, total
from shoal.core.facts import UpdatePace
from shoal.core.plan import Site
from shoal.core.trace import MAIN, LinkRate, TraceEvent
from shoal.planner.lanes import LaneJob, Lanes


@dataclass(frozen=True)
class SiteSpan:
    """One site on its lane: seconds since backward began."""

    site: Site
    ready_s: float
    sent_s: float  # moment when its last byte is through
    end_s: float  # moment when its gradients are there, or with their owners
    back_s: float  # moment when its parameters are back from their owners; 0 if it has none
    lanes: tuple[str, str]  # the lanes over which it goes and returns


@dataclass(frozen=True)
class Timeline:
    """A step as the planner sees it, on one rank."""

    forward_s: float  # the main thread's seconds, including time that lanes take from it
    waited_s: float  # seconds in forward of waiting for parameters from their owners
    backward_s: float  # the main thread's seconds, including time that lanes take from it
    end_s: float  # seconds from the start of backward until all needed gradients are there
    optimizer_s: float  # seconds of updates without owners
    spans: tuple[SiteSpan, ...]
    traffics: tuple[Traffic, ...]  # traffic of the sites
    late: int  # sites that are still on their way to servers when backward ends
    burst_s: float = 0.0  # seconds of the link that pass for free at the end
    # moments, with the share of the link that is used from then on
    used: tuple[tuple[float, float], ...] = ()
    # seconds of forward_s and backward_s in which the main thread waits for rows of other ranks
    crossing_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.waited_s + self.end_s + self.optimizer_s

    @property
    def computed_s(self) -> float:
        """Seconds of forward and backward in which the main thread waits for no other rank."""
        return self.forward_s + self.backward_s - self.crossing_s

    @property
    def exposed_s(self) -> float:
        """Seconds that the main thread waits for exchanges, wherever in the step."""
        return self.waited_s + self.end_s - self.backward_s + self.crossing_s

    @property
    def sent_bytes(self) -> float:
        """Bytes through the busiest direction of the busiest rank's link."""
        return total(self.traffics).worst

    def events(self) -> list[TraceEvent]:
        """Return the step as events from the start of its backward, in the form of a trace."""
        optimizer_end_s = self.end_s + self.optimizer_s
        forward_end_s = optimizer_end_s + self.forward_s + self.waited_s
        events = [
            TraceEvent("backward", MAIN, 0.0, self.backward_s),
            TraceEvent("wait for gradients", MAIN, self.backward_s, self.end_s),
            TraceEvent("optimizer", MAIN, self.end_s, optimizer_end_s),
            TraceEvent("forward, waits included", MAIN, optimizer_end_s, forward_end_s),
        ]
        for number, span in enumerate(self.spans):
            there, back = span.lanes
            label = f"site {number} ({span.site.strategy}: {', '.join(span.site.layers[:2])})"
            events.append(TraceEvent(f"exchange {label}", there, span.ready_s, span.end_s))
            if span.back_s:
                begin_s = max(span.end_s, self.end_s)
                events.append(TraceEvent(f"update and return {label}", back, begin_s, span.back_s))
        return events

    def rates(self, bytes_per_s: float) -> list[LinkRate]:
        """Return the busier direction's rate over time, on a link of so many bytes a second."""
        return [LinkRate("link", at_s, used * bytes_per_s * 8e-6) for at_s, used in self.used]


@dataclass(frozen=True)
class Compute:
    """A step without any traffic, as profiled."""

    forward_s: float
    backward_s: float
    # seconds from the start of forward, each layer in order
    needed_s: tuple[tuple[str, float], ...]
    # seconds from the start of backward, each layer in order
    ready_s: tuple[tuple[str, float], ...]
    nbytes: Mapping[str, int]  # bytes of each layer's parameters
    counts: Mapping[str, int]  # number of each layer's parameters
    update: UpdatePace  # the optimizers' time that does not depend on sizes
    update_bytes_s: float  # the optimizers' time for all bytes

    def own_update_s(self, updates: Mapping[str, Update]) -> float:
        """Return the seconds of the main thread's own updates.

        `updates` tells by layer which ranks update it. This rank updates all other layers itself.
        """
        parts = {layer: updates[layer].main if layer in updates else 1.0 for layer in self.nbytes}
        updated = sum(self.counts[layer] for layer, part in parts.items() if part)
        if not updated:
            return 0.0
        nbytes = sum(self.nbytes[layer] * part for layer, part in parts.items())
        return self.update.of(updated) + self.update_bytes_s * nbytes / self.total_nbytes

    def added_update_s(self, layer: str, part: float) -> float:
        """Return the seconds that a part of a layer's bytes adds to an update of other layers."""
        fixed_s = self.counts[layer] * self.update.parameter_s
        return fixed_s + self.update_bytes_s * part * self.nbytes[layer] / self.total_nbytes

    def owners_update_s(self, site: Site, update: Update) -> float:
        """Return the seconds that the busiest owner takes to update a site."""
        return self.update.of(update.pieces) + self.update_bytes_s * self.share(site) * update.lane

    def hosts_update_s(self, site: Site, update: Update) -> float:
        """Return the seconds of a site's update on a host that does not train, or 0."""
        if not update.host:
            return 0.0
        fixed_s = self.update.of(sum(self.counts[layer] for layer in site.layers))
        return fixed_s + self.update_bytes_s * self.share(site) * update.host

    def share(self, site: Site) -> float:
        """Return a site's part of all parameters, by bytes."""
        nbytes = sum(self.nbytes[layer] for layer in site.layers)
        return nbytes / site.parts / self.total_nbytes

    @cached_property
    def total_nbytes(self) -> int:
        """Bytes of all parameters, at least 1."""
        return max(sum(self.nbytes.values()), 1)


@dataclass(frozen=True)
class Priced:
    """A site, and the cost to serve it."""

    site: Site
    cost: Cost
    backward_with: str  # the layer at which its change of the backward counts


@dataclass(frozen=True)
class StateTraffic:
    """State that ranks agree on in backward, apart from gradients: its cost and its turn."""

    phase: Phase | None = None  # None: there is no such state
    goes_last: bool = False  # it goes after the gradients, or else before them


@dataclass(frozen=True, eq=False)
class _Flight:
    """A site's gradients on a lane."""

    priced: Priced
    lane: int  # the site's number among all that go in this direction
    direction: Direction
    sent: LaneJob


@final
class StepSimulation:
    """A predicted step: its sites run on lanes, next to the compute of the main thread."""

    def __init__(
        self,
        compute: Compute,
        sites: Sequence[Priced],
        lanes: Lanes,
        state: StateTraffic,
    ) -> None:
        self._compute, self._sites, self._lanes = compute, sites, lanes
        self._state = state
        self._cut = {p.site.layers[-1]: p for p in sites if p.cost.on_main_thread}
        self._on_lanes = [p for p in sites if any(map(_on_lane, p.cost.phases))]
        self._crossing_s = 0.0  # seconds in backward

    def run(self, late: int | None = None) -> Timeline:
        """Return the timeline. `late` sites at servers come back first: None means all."""
        lanes = self._lanes
        flights = self._backward()
        backward_s = lanes.now_s
        end_s, optimizer_s = self._gather_end(flights), self._optimizer_s()
        late, returned = self._on_the_way_back(flights, late, end_s)
        forward_s, waited_s = self._forward(end_s, end_s + optimizer_s, returned)
        sent = [*(flight.sent for flight in flights), *self._state_sent]
        lanes.finish([*sent, *returned.values()])
        return Timeline(
            forward_s,
            waited_s,
            backward_s,
            end_s,
            optimizer_s,
            tuple(self._span(flight, returned.get(flight)) for flight in flights),
            (*(priced.cost.traffic for priced in self._sites), *self._state_traffic()),
            late,
            lanes.burst_s,
            (*lanes.used, (lanes.now_s, 0.0)),
            self._crossing_s,
        )

    def seconds(self, most_s: float) -> float:
        """Return the step's seconds. Above `most_s`, it may be a smaller value above `most_s`.

        This costs less than `run`, and has the same bits.
        """
        flights = self._backward()
        end_s, optimizer_s = self._gather_end(flights), self._optimizer_s()
        least_s = end_s + optimizer_s + self._least_forward_s()
        if least_s > most_s:
            return least_s
        _, returned = self._on_the_way_back(flights, None, end_s)
        forward_s, waited_s = self._forward(end_s, end_s + optimizer_s, returned)
        return forward_s + waited_s + end_s + optimizer_s

    def _gather_end(self, flights: Sequence[_Flight]) -> float:
        """Return when all needed gradients are there, at the end of backward or after it."""
        backward_s = self._lanes.now_s
        needed = [flight.sent for flight in flights if _is_needed(flight.priced.cost.in_backward)]
        needed += self._state_sent
        self._lanes.finish(needed)  # 3
        return max([backward_s, *(job.end_s for job in needed)])

    def _on_the_way_back(
        self, flights: Sequence[_Flight], late: int | None, end_s: float
    ) -> tuple[int, dict[_Flight, LaneJob]]:
        """Count the late sites at servers, and send parameters back."""
        at_servers = [flight for flight in flights if _returns(flight) is Direction.IN]
        if late is None:
            late = sum(flight.sent.end_s == inf for flight in at_servers)
        first = at_servers[max(0, len(at_servers) - late) :]
        return late, self._send_back(flights, first, end_s)

    def _least_forward_s(self) -> float:
        """Return the least seconds of forward: its compute, without any wait."""
        changes_s = 0.0
        for priced in self._cut.values():
            phase = priced.cost.in_forward
            beside_s = phase.beside_s if phase and phase.wait is not Wait.AT_ONCE else 0.0
            changes_s += priced.cost.forward_s - beside_s
        return self._compute.forward_s + changes_s

    def _backward(self) -> list[_Flight]:
        """Compute backward, and send each site when its gradients come."""
        lanes, waiting = self._lanes, deque(self._on_lanes)
        numbers = {direction: count() for direction in Direction}
        last_layers = {priced.site.layers[-1] for priced in waiting}
        flights: list[_Flight] = []
        come: set[str] = set()
        clock = 0.0
        self._state_sent: list[LaneJob] = []
        if not self._state.goes_last:
            self._send_state(numbers, clock)
        for layer, seconds in self._last_rank():
            clock += seconds
            if layer in self._cut:
                clock = self._waited_in_backward(self._cut[layer].cost, clock)  # 6
            elif layer in last_layers:
                clock = lanes.pay(clock)
            come.add(layer)
            while waiting and waiting[0].site.layers[-1] in come:  # 2
                priced = waiting.popleft()
                phase = _on_lane(priced.cost.in_backward)
                direction = phase.direction if phase else Direction.BOTH
                number = next(numbers[direction])
                parts = lanes.parts(phase) if phase else ()
                job = lanes.add(number, clock, *parts, direction=direction)  # 1
                flights.append(_Flight(priced, number, direction, job))
        if self._state.goes_last:
            self._send_state(numbers, clock)
        lanes.pay(clock)
        return flights

    def _send_state(self, numbers: Mapping[Direction, count[int]], clock: float) -> None:
        """Send the state that ranks agree on in backward."""
        phase = self._state.phase
        if phase is not None:
            lanes, direction = self._lanes, phase.direction
            number = next(numbers[direction])
            parts = lanes.parts(phase)
            self._state_sent.append(lanes.add(number, clock, *parts, direction=direction))

    def _state_traffic(self) -> tuple[Traffic, ...]:
        phase = self._state.phase
        return () if phase is None else (phase.traffic,)

    def _last_rank(self) -> Iterator[tuple[str, float]]:
        """Yield the slowest rank's backward: each layer, and seconds since the one before.

        If ranks share cores without a quota for each, they do not keep step, but take turns. The
        last rank has to wait, and is then faster. Ranks meet at each layer that is cut over them.
        """
        turn, changes = self._lanes.turn, self._changes()
        profiled_s, spared_s = 0.0, 0.0
        run: list[tuple[str, float]] = []  # layers since the ranks have met
        for layer, ready_s in (*self._compute.ready_s, ("", self._compute.backward_s)):
            change_s = changes.get(layer, 0.0) + spared_s
            own_s = ready_s - profiled_s + change_s
            spared_s = min(0.0, own_s) if change_s < 0 else 0.0
            run.append((layer, max(0.0, own_s)))
            profiled_s = max(profiled_s, ready_s)
            if layer in self._cut or not layer:
                waits_s = (1 - turn) * sum(seconds for _, seconds in run)
                for index, (name, seconds) in enumerate(run):
                    yield name, turn * seconds + (0.0 if index else waits_s)
                run = []

    def _changes(self) -> Mapping[str, float]:
        """Return the seconds that strategies add to the backward of layers."""
        changes: dict[str, float] = defaultdict(float)
        for priced in self._sites:
            changes[priced.backward_with] += priced.cost.backward_s
        return changes

    def _waited_in_backward(self, cost: Cost, clock: float) -> float:
        """Return the main thread's clock at the end of a cut layer's backward.

        It computes the last seconds of this backward while it waits.
        """
        phase, lanes = cost.in_backward, self._lanes
        if phase is None or phase.wait is not Wait.AT_ONCE:
            return lanes.pay(clock)
        # backward takes turns, as in `_last_rank`
        beside_s = min(lanes.turn * phase.beside_s, max(0.0, clock - lanes.now_s))
        begin_s = lanes.pay(clock - beside_s)
        end_s = lanes.wait(begin_s, phase, beside_s)
        self._crossing_s += max(0.0, end_s - begin_s - beside_s)
        return end_s

    def _send_back(
        self, flights: Sequence[_Flight], first: Sequence[_Flight], end_s: float
    ) -> dict[_Flight, LaneJob]:
        """Send parameters back, updated by their owners, from the end of backward on."""  # 4
        returned: dict[_Flight, LaneJob] = {}
        for flight in dict.fromkeys((*first, *reversed(flights))):
            site, cost = flight.priced.site, flight.priced.cost
            if phase := cost.after_step:
                update_s = self._compute.owners_update_s(site, cost.update)
                returned[flight] = self._lanes.add(
                    flight.lane,
                    end_s,
                    *self._lanes.parts(phase, update_s),
                    direction=phase.direction,
                    after=flight.sent,
                )
        return returned

    def _optimizer_s(self) -> float:
        """Return seconds of the main thread's own updates."""
        return self._compute.own_update_s(
            {layer: priced.cost.update for priced in self._sites for layer in priced.site.layers}
        )

    def _forward(
        self, end_s: float, begin_s: float, returned: Mapping[_Flight, LaneJob]
    ) -> tuple[float, float]:
        """Return the seconds of the forward: computing, and waiting for parameters and cut layers.

        It begins after the optimizer. Updates on other hosts run from the end of backward on.
        """
        lanes, back = self._lanes, _by_layer(returned)
        clock, passed_s, waited_s, change_s = begin_s, 0.0, 0.0, 0.0
        for layer, needed_s in self._compute.needed_s:
            own_s = needed_s - passed_s + change_s
            clock += max(0.0, own_s)
            passed_s, change_s = needed_s, min(0.0, own_s)
            if layer not in back and layer not in self._cut:
                continue
            clock = lanes.pay(clock)
            if layer in self._cut:  # 6
                cost = self._cut[layer].cost
                beside_s = cost.in_forward.beside_s if cost.in_forward else 0.0
                called_s, clock = clock, self._waited_in_forward(self._cut[layer], clock, end_s)
                waited_s += clock - called_s - beside_s
                change_s += cost.forward_s - beside_s
            if layer in back:  # 5
                lanes.finish(back[layer])
                missing_s = max(0.0, *(job.end_s - clock for job in back[layer]))
                clock, waited_s = clock + missing_s, waited_s + missing_s
        own_s = self._compute.forward_s - passed_s + change_s
        clock = lanes.pay(clock + max(0.0, own_s))
        return clock - begin_s - waited_s, waited_s

    def _waited_in_forward(self, priced: Priced, clock: float, end_s: float) -> float:
        """Return the main thread's clock when a cut layer has its inputs and updated parameters."""
        updated_s = end_s + self._compute.hosts_update_s(priced.site, priced.cost.update)
        clock, phase = max(clock, updated_s), priced.cost.in_forward
        if phase is None or phase.wait is not Wait.AT_ONCE:
            return clock
        return self._lanes.wait(clock, phase, phase.beside_s)

    def _span(self, flight: _Flight, back: LaneJob | None) -> SiteSpan:
        sent, back_s = flight.sent, back.end_s if back else 0.0
        names = self._lanes.named(flight.lane, flight.direction)
        return SiteSpan(flight.priced.site, sent.ready_s, sent.sent_s, sent.end_s, back_s, names)


def _on_lane(phase: Phase | None) -> Phase | None:
    """Return the phase if a lane sends it, or None."""
    return None if phase is None or phase.wait is Wait.AT_ONCE else phase


def _is_needed(phase: Phase | None) -> bool:
    return phase is not None and phase.wait is Wait.WHEN_NEEDED


def _returns(flight: _Flight) -> Direction | None:
    """Return the direction in which parameters come back over the link, or None."""
    phase = flight.priced.cost.after_step
    return phase.direction if phase else None


def _by_layer(returned: Mapping[_Flight, LaneJob]) -> Mapping[str, Iterable[LaneJob]]:
    """Return the jobs that each layer's forward waits for."""
    back: dict[str, list[LaneJob]] = defaultdict(list)
    for flight, job in returned.items():
        if _is_needed(flight.priced.cost.after_step):
            for layer in flight.priced.site.layers:
                back[layer].append(job)
    return back
