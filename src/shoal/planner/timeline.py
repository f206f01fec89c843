"""The timeline of one step: what a plan's transfers cost beside the backward they hide under.

One rank's main thread computes; its lanes take transfers in the plan's order, share one link, and
compute too:

    backward   |── layer 9 ──|── layer 8 ──|─────── layer 7 ───────|──┄┄        1
    lane 0                   |▒▒ send 9 ▒▒|== multiply ==|                      2
    lane 1                                 |··· waits ···|▒▒▒▒ send 8, 7 ▒▒▒▒|  3

    1  the profile's times, and what the strategy changes of them
    2  the link, then the lane's own compute
    3  a transfer starts when its last layer's gradient is there and a lane is free

    step = forward + waited + max(backward, last lane) + optimizer              (predict)

Of a site whose owners update it, the first half of the traffic is sent so, and waited for by
nobody; update and second half follow on its lane (from servers on another) from the optimizer's
step on, last site first, and the next forward waits layer by layer:

    forward    |─ 1 ─|─ 2 ─|┄┄ waited ┄┄|── 3 ──|        that forward is taken to be this step's
    lanes      |= update 1 =|▒▒ back 1 ▒▒|▒▒▒ back 3 ▒▒▒|    own: a steady state

The rows that go to and from a layer that is cut over ranks are sent by the main thread, which
computes beside some of them and waits for the rest, on the link that it shares with the lanes.

Lanes share the link evenly, each at its exchange's pace, and the processor with the main thread:
both are slower where it is short, for what lanes compute and for the processor time of exchanges
(lanes.py). What hides costs nothing until link or processor is full. Equations: docs/planner.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from operator import attrgetter

from shoal.codecs.coded import exchange_named
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.cost import Cost, Traffic, total
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.plan import Choice, Plan, Site
from shoal.core.registry import of
from shoal.core.role import Role
from shoal.core.trace import MAIN, Event, Rate
from shoal.planner.lanes import BACK, BOTH, THERE, Job, Lanes

_BURST = 0.01  # of the step: what is less does not change it


@dataclass(frozen=True)
class Span:
    """One site on its lane: seconds since backward began."""

    site: Site
    ready_s: float
    sent_s: float  # its last byte is through
    end_s: float  # its gradients are there, or with their owners
    back_s: float  # its parameters are back from their owners; 0 where it has none
    lanes: tuple[str, str]  # it goes over, and comes back over


@dataclass(frozen=True)
class Timeline:
    """A step as the planner sees it, on one rank."""

    forward_s: float  # of the main thread, with what lanes take from it
    waited_s: float  # in forward, for parameters that their owners send
    backward_s: float  # of the main thread, with what lanes take from it
    end_s: float  # since backward began, until every gradient is there that is waited for
    optimizer_s: float  # of what is not updated by owners
    spans: tuple[Span, ...]
    traffics: tuple[Traffic, ...]  # of the sites
    late: int  # sites that are still on their way to servers when backward ends
    burst_s: float = 0.0  # of the link that pass for free when it ends
    used: tuple[tuple[float, float], ...] = ()  # from when on how much of the link

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.forward_s + self.waited_s + self.end_s + self.optimizer_s

    @property
    def sent_bytes(self) -> float:
        """Bytes through the busiest direction of the busiest rank's link."""
        return total(self.traffics).worst

    def events(self) -> list[Event]:
        """The step as events from the start of its backward: what a trace of it should look
        like.
        """
        optimizer_end_s = self.end_s + self.optimizer_s
        main = [
            Event("backward", MAIN, 0.0, self.backward_s),
            Event("wait for gradients", MAIN, self.backward_s, self.end_s),
            Event("optimizer", MAIN, self.end_s, optimizer_end_s),
            Event(
                "forward, waits included",
                MAIN,
                optimizer_end_s,
                optimizer_end_s + self.forward_s + self.waited_s,
            ),
        ]
        for index, span in enumerate(self.spans):
            label = f"site {index} ({span.site.strategy}: {', '.join(span.site.layers[:2])})"
            main.append(Event(f"exchange {label}", span.lanes[0], span.ready_s, span.end_s))
            if span.back_s:
                begin_s = max(span.end_s, self.end_s)
                main.append(
                    Event(f"update and return {label}", span.lanes[1], begin_s, span.back_s)
                )
        return main

    def rates(self, bytes_per_s: float) -> list[Rate]:
        """What the link carries, in the busier direction, as it is taken for one of so many bytes a
        second.
        """
        return [Rate("link", at_s, used * bytes_per_s * 8e-6) for at_s, used in self.used]


def as_planned(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile with what the plan says of owners, of the end of the model, and of chunks."""
    return profile.placed(plan.owners(profile.names)).joining(plan.joined).in_chunks(plan.chunks)


class Predictor:
    """Predicts steps of one model on one cluster; what it works out for a site it keeps."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self._layers = {layer.name: layer for layer in profile.layers}
        self._nbytes = {layer.name: layer.nbytes for layer in profile.layers}
        self._total_nbytes = max(sum(self._nbytes.values()), 1)
        self._ready_s = {layer.name: layer.ready_s for layer in profile.layers}
        self._needed_s = [
            (layer.name, layer.needed_s)
            for layer in sorted(profile.layers, key=attrgetter("needed_s"))
        ]
        self._strategies = {name: kind() for name, kind in of(Strategy).items()}
        self._roles = {name: kind.role for name, kind in self._strategies.items()}
        self._placed = any(p.owner is not None for each in profile.layers for p in each.parameters)
        self._exchanges: dict[str, Exchange] = {}
        self._costs: dict[Site, Cost] = {}

    def refusal(self, layer: LayerProfile, strategy: str) -> str | None:
        """Why a strategy cannot serve a layer, or None."""
        kind = self._strategies[strategy]
        if self.cluster.ahead and not kind.role.takes_servers:
            return "workers run ahead of one another, so servers own every layer"
        return kind.refusal(layer, self.cluster)

    def layer(self, name: str) -> LayerProfile:
        """A layer by its name."""
        return self._layers[name]

    def strategy(self, name: str) -> Strategy:
        """A strategy by its name."""
        return self._strategies[name]

    def needs(self, layer: str, strategy: str) -> dict[str, str]:
        """Other layers, each with the strategy that it must have where this one serves the
        layer.
        """
        return self._strategies[strategy].needs(self._layers[layer])

    def _sites(self, plan: Plan) -> Iterator[Site]:
        return plan.sites(self._nbytes, self._roles, placed=self._placed)

    def role(self, strategy: str) -> Role:
        """What part a strategy plays."""
        return self._roles[strategy]

    def native(self, exchange: str) -> bool:
        """Whether the network library itself carries it."""
        return self.exchange(exchange).native

    def exchange(self, text: str) -> Exchange:
        """The exchange that a plan writes so."""
        if text not in self._exchanges:
            self._exchanges[text] = exchange_named(text)
        return self._exchanges[text]

    def carriers(self, strategy: str) -> list[str]:
        """The exchanges that can carry a strategy here and give the exact sum; [''] where it takes
        none.
        """
        if not self.role(strategy).takes_exchange:
            return [""]
        kinds = {name: kind() for name, kind in of(Exchange).items()}
        fitting = {
            name: each
            for name, each in kinds.items()
            if each.exact and each.fits(self.cluster.topology)
        }
        return [name for name, each in fitting.items() if self._strategies[strategy].takes(each)]

    def cost(self, site: Site) -> Cost:
        """What serving a site costs one rank."""
        if site not in self._costs:
            takes_exchange = self.role(site.strategy).takes_exchange
            carrier = self.exchange(site.exchange) if takes_exchange else None
            layers = [self._layers[name] for name in site.layers]
            if site.parts > 1:
                layers = [
                    layer.part(site.spans([p.numel for p in layer.parameters])) for layer in layers
                ]
            self._costs[site] = self._strategies[site.strategy].estimate(
                layers, carrier, self.cluster
            )
        return self._costs[site]

    def update_s(self, layer: LayerProfile) -> float:
        """Seconds that the optimizer takes for one layer."""
        return self.profile.optimizer_s * layer.nbytes / self._total_nbytes

    def alone_s(self, choice: Choice) -> tuple[float, float]:
        """Bytes, and seconds of link and lane, of one layer served by itself."""
        cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
        # one way, then back
        again_s = (
            cost.traffic.worst * cost.pace.wall.byte_s * self.role(choice.strategy).owns_at_servers
        )
        return cost.traffic.worst, cost.pace.wall.of(cost.traffic) + again_s + cost.lane_s

    def added_s(self, choice: Choice) -> float:
        """Seconds that one layer served so adds to a step in which nothing hides."""
        cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
        return self.alone_s(choice)[1] + cost.forward_s + cost.backward_s

    def lone(self, choices: Iterable[Choice]) -> list[str]:
        """The layers that need another, which these choices serve otherwise."""
        served = {choice.layer: choice.strategy for choice in choices}
        needs = {name: self.needs(name, strategy) for name, strategy in served.items()}
        return [
            name
            for name, others in needs.items()
            if any(served[other] != its for other, its in others.items())
        ]

    def memory_bytes(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> float:
        """What the busiest rank holds between steps: parameters, optimizer state, gradients and
        buckets.
        """
        plan = Plan(self.cluster.size, self.profile.digest, tuple(choices), bucket_bytes, lanes)
        state_per_byte = self.profile.state_bytes / self._total_nbytes
        held = 0.0
        for site in self._sites(plan):
            cost = self.cost(site)
            nbytes = sum(self._nbytes[name] for name in site.layers) / site.parts
            held += (
                nbytes * (cost.held + state_per_byte * (cost.owned or cost.held))
                + cost.memory_bytes
            )
        return held

    def as_is(self, plan: Plan) -> Timeline:
        """The timeline of a step under a plan."""
        return self.predict(plan.choices, plan.bucket_bytes, plan.lanes, plan.late)

    def predict(
        self, choices: Sequence[Choice], bucket_bytes: int, lanes: int, late: int | None = None
    ) -> Timeline:
        """The timeline of a step under these choices; None: those come back first from servers that
        are late.
        """
        plan = Plan(self.cluster.size, self.profile.digest, tuple(choices), bucket_bytes, lanes)
        served = [(site, self.cost(site)) for site in self._sites(plan)]
        sent = [(site, cost) for site, cost in served if cost.awaited is None]
        cuts = {site.layers[-1]: (site, cost) for site, cost in served if cost.awaited is not None}
        changes: dict[str, float] = defaultdict(float)
        for site, cost in served:
            at_tail = self.role(site.strategy).is_at_tail
            changes[site.layers[0 if at_tail else -1]] += cost.backward_s
        timeline = self._run(sent, changes, cuts, Lanes(self.cluster, lanes), late)
        # what a step leaves of a burst the next one has
        if self.cluster.link.burst_s > _BURST * timeline.step_s:
            timeline = self._run(
                sent, changes, cuts, Lanes(self.cluster, lanes, timeline.burst_s), late
            )
        return timeline

    def floor_s(self, plan: Plan) -> float:
        """What no schedule of this plan can beat: its compute, or its bytes that leave a host at
        the rate of the link.

        Compute is the main thread's, with what lanes compute and the processor time of the bytes
        where they share its processor. For what a main thread waits for there is no more than its
        bytes.
        """
        costs = [self.cost(site) for site in self._sites(plan)]
        lanes = Lanes(self.cluster, plan.lanes)
        lanes_s = sum(lanes.processor_s(cost.pace, cost.traffic) + cost.lane_s for cost in costs)
        owned = cut = 0.0
        for choice in plan.choices:
            cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
            owned += self._nbytes[choice.layer] / self._total_nbytes * bool(cost.owned)
            cut += self._nbytes[choice.layer] / self._total_nbytes * (1 - cost.held)
        changes_s = sum(cost.forward_s + cost.backward_s for cost in costs)
        main_s = self.profile.forward_s + self.profile.backward_s + changes_s
        main_s += self.profile.optimizer_s * (1 - owned - cut)
        lanes_s += self.profile.optimizer_s * owned / self.cluster.size
        compute_s = max(main_s, (main_s + lanes_s) / lanes.processors)
        return max(compute_s, self.cluster.link_s(total([cost.traffic for cost in costs])))

    def _run(
        self,
        served: Sequence[tuple[Site, Cost]],
        changes: Mapping[str, float],
        cuts: Mapping[str, tuple[Site, Cost]],
        lanes: Lanes,
        late: int | None,
    ) -> Timeline:
        profile = self.profile
        going = _going(served, self._roles)
        waiting: dict[str, list[int]] = {}
        for index, (site, _) in enumerate(served):
            waiting.setdefault(site.layers[-1], []).append(index)
        ready = [False] * len(served)
        sent: list[Job] = []
        clock = 0.0
        for name, seconds in self._last_rank(changes, cuts, lanes):
            clock += seconds
            if name not in waiting and name not in cuts:
                continue
            clock = _waited(cuts[name][1], 1, clock, lanes) if name in cuts else lanes.pay(clock)
            for index in waiting.get(name, ()):
                ready[index] = True
            while len(sent) < len(served) and ready[len(sent)]:
                sent.append(_send(served[len(sent)][1], *going[len(sent)], clock, lanes))
        backward_s = lanes.pay(clock)
        updated = [index for index, (_, cost) in enumerate(served) if cost.owned]
        waited_for = [job for job, (_, cost) in zip(sent, served, strict=True) if not cost.owned]
        lanes.finish(waited_for)
        end_s = max([backward_s, *(job.end_s for job in waited_for)])
        at_servers = [index for index in updated if going[index][1] == THERE]
        if late is None:
            late = sum(sent[index].end_s == inf for index in at_servers)
        first = at_servers[max(0, len(at_servers) - late) :]
        coming = (*first, *(index for index in reversed(updated) if index not in first))
        returned = {i: self._return(*served[i], *going[i], end_s, sent[i], lanes) for i in coming}
        back: dict[str, list[Job]] = defaultdict(list)
        for index, job in returned.items():
            for name in served[index][0].layers:
                back[name].append(job)
        cut_bytes = sum(
            self._nbytes[name] * (1 - cost.held)
            for site, cost in cuts.values()
            for name in site.layers
        )
        elsewhere_bytes = sum(self._nbytes[name] for name in back) + cut_bytes
        optimizer_s = profile.optimizer_s * (1 - elsewhere_bytes / self._total_nbytes)
        forward_s, waited_s = self._forward(end_s, end_s + optimizer_s, back, cuts, lanes)
        lanes.finish([*sent, *returned.values()])
        spans = [
            Span(
                site,
                job.ready_s,
                job.sent_s,
                job.end_s,
                returned[index].end_s if index in returned else 0.0,
                lanes.named(*going[index]),
            )
            for index, ((site, _), job) in enumerate(zip(served, sent, strict=True))
        ]
        traffics = tuple(cost.traffic for _, cost in (*served, *cuts.values()))
        parts = forward_s, waited_s, backward_s, end_s, optimizer_s
        return Timeline(
            *parts, tuple(spans), traffics, late, lanes.burst_s, (*lanes.used, (lanes.now_s, 0.0))
        )

    def _last_rank(
        self, changes: Mapping[str, float], cuts: Container[str], lanes: Lanes
    ) -> Iterator[tuple[str, float]]:
        """The backward of the rank for which all others wait: each layer, and seconds since the one
        before.

        Where ranks share cores they do not keep step, but take turns: the last has to wait, and is
        then faster. They meet at each layer that is cut over them.
        """
        turn = lanes.turn
        profiled, run, spared_s = 0.0, [], 0.0
        for name, ready_s in [*self._ready_s.items(), ("", self.profile.backward_s)]:
            own_s = ready_s - profiled + changes.get(name, 0.0) + spared_s
            spared_s = min(0.0, own_s) if changes.get(name, 0.0) + spared_s < 0 else 0.0
            run.append((name, max(0.0, own_s)))
            profiled = max(profiled, ready_s)
            if name in cuts or not name:
                waits_s = (1 - turn) * sum(seconds for _, seconds in run)
                for index, (each, seconds) in enumerate(run):
                    yield each, turn * seconds + (0.0 if index else waits_s)
                run = []

    def _return(
        self, site: Site, cost: Cost, number: int, way: int, now: float, sent: Job, lanes: Lanes
    ) -> Job:
        """A site's parameters, updated by their owners and sent back."""
        share = sum(self._nbytes[name] for name in site.layers) / site.parts / self._total_nbytes
        update = lanes.compute(self.profile.optimizer_s * share * cost.owned)
        way = BACK if way == THERE else way
        back = lanes.exchange(cost.pace, _one_half(cost.traffic, way), way)
        return lanes.add(
            number, now, update, *back, lanes.compute(cost.lane_s), way=way, after=sent
        )

    def _forward(
        self,
        end: float,
        begin: float,
        back: Mapping[str, list[Job]],
        cuts: Mapping[str, tuple[Site, Cost]],
        lanes: Lanes,
    ) -> tuple[float, float]:
        """Seconds of the forward, and of its waiting for parameters and for the rows that go to and
        from cut layers.

        It begins after the optimizer; what is updated elsewhere is so from the `end` of backward
        on.
        """
        clock, passed, waited_s, change_s = begin, 0.0, 0.0, 0.0
        for name, needed_s in self._needed_s:
            own_s = needed_s - passed + change_s
            clock += max(0.0, own_s)
            passed, change_s = needed_s, min(0.0, own_s)
            if name not in back and name not in cuts:
                continue
            clock = lanes.pay(clock)
            if name in cuts:
                site, cost = cuts[name]
                updated = (
                    end
                    + sum(self.update_s(self._layers[each]) for each in site.layers)
                    * cost.elsewhere
                )
                begin_s, clock = clock, _waited(cost, 0, max(clock, updated), lanes)
                waited_s += clock - begin_s - cost.beside[0]
                change_s += cost.forward_s - cost.beside[0]
            if name in back:
                lanes.finish(back[name])
                missing_s = max(0.0, *(job.end_s - clock for job in back[name]))
                clock, waited_s = clock + missing_s, waited_s + missing_s
        clock = lanes.pay(clock + max(0.0, self.profile.forward_s - passed + change_s))
        return clock - begin - waited_s, waited_s


def _going(served: Sequence[tuple[Site, Cost]], roles: Mapping[str, Role]) -> list[tuple[int, int]]:
    """Each site's number among those that go the same way, and the directions of the link that it
    first takes.
    """
    numbers = {BOTH: count(), THERE: count()}
    ways = [THERE if roles[site.strategy].owns_at_servers else BOTH for site, _ in served]
    return [(next(numbers[way]), way) for way in ways]


def _one_half(traffic: Traffic, way: int) -> Traffic:
    return traffic.half if way == BOTH else traffic.one_way


def _send(cost: Cost, number: int, way: int, now: float, lanes: Lanes) -> Job:
    """A site's gradients, whole or to their owners."""
    if cost.owned:
        return lanes.add(
            number, now, *lanes.exchange(cost.pace, _one_half(cost.traffic, way), way), way=way
        )
    return lanes.add(
        number, now, *lanes.exchange(cost.pace, cost.traffic), lanes.compute(cost.lane_s)
    )


def _waited(cost: Cost, way: int, clock: float, lanes: Lanes) -> float:
    """When the main thread goes on that comes to a cut layer in forward (0), or has computed it in
    backward (1), at its `clock`: the first seconds of that compute, or the last, are beside what it
    waits for."""
    assert cost.awaited is not None
    beside_s = cost.beside[way]
    if way == 1:
        # as `_last_rank` has that compute
        beside_s = min(lanes.turn * beside_s, max(0.0, clock - lanes.now_s))
        clock = lanes.pay(clock - beside_s)
    return lanes.wait(clock, cost.pace, cost.awaited[way], beside_s)
