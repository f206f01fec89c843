"""Predicts steps of one model on one cluster: prices the sites of a plan, and runs the step.

    plan ─▶ sites (core/plan.py) ─▶ costs (each strategy's `estimate`) ─▶ timeline (step.py)

Results for a site are kept, so that a search pays for each site once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter

from shoal.codecs.coded_exchange import read_exchange, with_codec
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.cost import Cost, Phase, total
from shoal.core.facts import Cluster, LayerProfile, ModelProfile, Setting
from shoal.core.plan import LEAST_PART_BYTES, Choice, Plan, Site
from shoal.core.registry import of
from shoal.core.role import Role
from shoal.core.way import rows_and_rest
from shoal.planner.lanes import Lanes, Speeds
from shoal.planner.step import Compute, Priced, StateTraffic, StepSimulation, Timeline
from shoal.strategies.state_agreement import phase_of
from shoal.strategies.sync_batchnorm import phases_of

_BURST = 0.01  # share of the step: a smaller burst does not change it


def with_settings_of(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """Return the profile with the plan's settings of owners, of the model's end, and of chunks."""
    setting = Setting(chunks=plan.chunks, joined=plan.joined, parts=plan.micro_batches)
    return profile.with_owners(plan.owners(profile.names)).under(setting).updated(plan.periods)


class Predictor:
    """Predicts steps of one model on one cluster, and keeps its results for each site."""

    def __init__(self, profile: ModelProfile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self._layers = {layer.name: layer for layer in profile.layers}
        # periods of layers that are not updated in each step
        self.periods = {
            layer.name: layer.setting.every for layer in profile.layers if layer.setting.every > 1
        }
        self._norms = phases_of(profile.norms, cluster)
        self._compute = _compute(profile, self._norms)
        self._strategies = {name: kind() for name, kind in of(Strategy).items()}
        self._roles = {name: kind.role for name, kind in self._strategies.items()}
        self._placed = any(
            p.owner is not None for layer in profile.layers for p in layer.parameters
        )
        self._state = StateTraffic(
            phase_of(profile.moving, cluster), any(state.in_backward for state in profile.moving)
        )
        self._speeds = Speeds(cluster)
        self._exchanges: dict[str, Exchange] = {}
        self._prices: dict[Site, Priced] = {}
        self._needs: dict[tuple[str, str], dict[str, str]] = {}

    def refusal(self, layer: LayerProfile, strategy: str) -> str | None:
        """Return why a strategy cannot serve a layer, or None."""
        kind = self._strategies[strategy]
        if self.cluster.ahead and not kind.role.takes_servers:
            return "workers run ahead of one another, so servers own every layer"
        every = layer.setting.every
        if every > 1 and not kind.role.waits_for_updates:
            able = [name for name, role in self._roles.items() if role.waits_for_updates]
            return f"it is updated every {every} steps, which goes with {', '.join(able)} only"
        return kind.refusal(layer, self.cluster)

    def unasked(self, layer: LayerProfile, strategy: str) -> str | None:
        """Return why a strategy that can serve a layer does so only by a pin, or None."""
        if layer.may_vary and self._roles[strategy].is_cut:
            return f"{layer.may_vary}: pin it where every rank calls it as often as the others"
        return None

    def layer(self, name: str) -> LayerProfile:
        """Return a layer by its name."""
        return self._layers[name]

    def strategy(self, name: str) -> Strategy:
        """Return a strategy by its name."""
        return self._strategies[name]

    def needs(self, layer: str, strategy: str) -> dict[str, str]:
        """Return the layers that this strategy needs, with the strategy that each must have."""
        if (layer, strategy) not in self._needs:
            self._needs[layer, strategy] = self._strategies[strategy].needs(self._layers[layer])
        return self._needs[layer, strategy]

    def _sites(self, plan: Plan) -> Iterator[Site]:
        return plan.sites(self._compute.nbytes, self._roles, placed=self._placed)

    def role(self, strategy: str) -> Role:
        """Return the role that a strategy plays."""
        return self._roles[strategy]

    def native(self, exchange: str) -> bool:
        """Return whether the network library itself carries this exchange."""
        return self.exchange(exchange).native

    def exchange(self, text: str) -> Exchange:
        """Return the exchange that a plan writes so."""
        if text not in self._exchanges:
            self._exchanges[text] = read_exchange(text)
        return self._exchanges[text]

    def carriers(self, strategy: str) -> list[str]:
        """Return the exact exchanges that can carry a strategy here; [''] if it takes none."""
        if not self.role(strategy).takes_exchange:
            return [""]
        kinds = {name: kind() for name, kind in of(Exchange).items()}
        fitting = {
            name: exchange
            for name, exchange in kinds.items()
            if exchange.exact
            and exchange.fits(self.cluster.topology)
            and (exchange.at_host or name in self.cluster.paces)
        }
        takes = self._strategies[strategy].takes
        return [name for name, exchange in fitting.items() if takes(exchange)]

    def coding_carriers(self, strategy: str, codec: Codec) -> list[str]:
        """Return the exchanges here that carry a codec's codes for a strategy."""
        if self.cluster.ahead:
            return []  # a server answers each worker by itself
        takes = self._strategies[strategy].takes
        exchanges = [self.exchange(name) for name in self.carriers(strategy)]
        return [
            str(exchange)
            for exchange in exchanges
            if (both := with_codec(exchange, codec)) is not None and takes(both)
        ]

    def cost(self, site: Site) -> Cost:
        """Return the cost of a site for one rank."""
        return self._price_site(site).cost

    def costs(self, plan: Plan) -> list[Cost]:
        """Return the cost of each site of a plan for one rank."""
        return [self.cost(site) for site in self._sites(plan)]

    def _price_site(self, site: Site) -> Priced:
        if site not in self._prices:
            # the tail's backward is over before the workers' begins; stations change all of it
            role = self.role(site.strategy)
            number = 0 if role.runs_elsewhere else -1
            self._prices[site] = Priced(site, self._estimate(site), site.layers[number])
        return self._prices[site]

    def _estimate(self, site: Site) -> Cost:
        takes_exchange = self.role(site.strategy).takes_exchange
        carrier = self.exchange(site.exchange) if takes_exchange else None
        layers = [self._layers[name] for name in site.layers]
        if site.parts > 1:
            layers = [
                layer.part(site.spans([p.numel for p in layer.parameters])) for layer in layers
            ]
        strategy = self._strategies[site.strategy]
        codec, rest = rows_and_rest(site.exchange)
        if strategy.codes_rows and codec:
            setting = replace(layers[0].setting, codec=codec)
            layers = [replace(layer, setting=setting) for layer in layers]
        if self.role(site.strategy).names_ranks:
            layers = [
                replace(layer, setting=replace(layer.setting, rank=int(rank or 0)))
                for layer, rank in zip(layers, rest.split(","), strict=True)
            ]
        cost, every = strategy.estimate(layers, carrier, self.cluster), layers[0].setting.every
        if every > 1:
            kept_bytes = sum(layer.nbytes for layer in layers)
            cost = replace(cost.each(every), memory_bytes=cost.memory_bytes + kept_bytes)
        return cost.mean

    def update_s(self, layer: LayerProfile, part: float) -> float:
        """Return the seconds that the optimizer adds for a part of one layer's bytes."""
        return self._compute.added_update_s(layer.name, part)

    def alone_s(self, choice: Choice) -> tuple[float, float]:
        """Return bytes, and seconds of link and lane, of one layer served by itself."""
        cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
        return cost.traffic.worst, cost.alone_s

    def added_s(self, choice: Choice) -> float:
        """Return the seconds that this choice adds to a step in which nothing hides."""
        cost = self.cost(Site((choice.layer,), choice.strategy, choice.exchange))
        return self.alone_s(choice)[1] + cost.forward_s + cost.backward_s

    def lone(self, choices: Iterable[Choice]) -> list[str]:
        """Name the layers that need another layer, but do not get it by these choices."""
        served = {choice.layer: choice.strategy for choice in choices}
        needs = {name: self.needs(name, strategy) for name, strategy in served.items()}
        return [
            name
            for name, needed in needs.items()
            if any(served[other] != strategy for other, strategy in needed.items())
        ]

    def _plan(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> Plan:
        return Plan(
            self.cluster.size,
            self.profile.digest,
            tuple(choices),
            bucket_bytes,
            lanes,
        ).with_periods(self.periods)

    def memory_bytes(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> float:
        """Return the bytes of parameters, state, gradients and buckets on the fullest rank."""
        plan = self._plan(choices, bucket_bytes, lanes)
        state_per_byte = self.profile.state_bytes / self._compute.total_nbytes
        held = 0.0
        for site in self._sites(plan):
            cost = self.cost(site)
            nbytes = sum(self._compute.nbytes[name] for name in site.layers) / site.parts
            updated = cost.update.main + cost.update.lane
            held += nbytes * (cost.held + state_per_byte * updated) + cost.memory_bytes
        return held

    def as_is(self, plan: Plan) -> Timeline:
        """Return the timeline of a step under a plan."""
        return self._run(plan, plan.late)

    def predict(
        self,
        choices: Sequence[Choice],
        bucket_bytes: int,
        lanes: int,
        late: int | None = None,
        least_part_bytes: int = LEAST_PART_BYTES,
    ) -> Timeline:
        """Return the timeline of a step under these choices.

        `late` sites at servers come back first; None means all late ones.
        """
        plan = self._plan(choices, bucket_bytes, lanes)
        return self._run(replace(plan, least_part_bytes=least_part_bytes), late)

    def step_s(
        self,
        choices: Sequence[Choice],
        bucket_bytes: int,
        lanes: int,
        least_part_bytes: int = LEAST_PART_BYTES,
        most_s: float = inf,
    ) -> float:
        """Return the seconds of a step under these choices, equal to the prediction of `predict`.

        Above `most_s`, the result may be a smaller value above `most_s`, which takes less time.
        """
        plan = replace(self._plan(choices, bucket_bytes, lanes), least_part_bytes=least_part_bytes)
        step_s = self._step(plan).seconds(most_s)
        return self._run(plan, None).step_s if self._bursts(step_s) else step_s

    def _step(self, plan: Plan, burst_s: float = 0.0) -> StepSimulation:
        """Return a step under a plan that begins with so many seconds of a burst."""
        sites = [self._price_site(site) for site in self._sites(plan)]
        lanes = Lanes(self.cluster, plan.lanes, self._speeds, burst_s)
        return StepSimulation(self._compute, sites, lanes, self._state)

    def _bursts(self, step_s: float) -> bool:
        """Return whether the burst that a step leaves over changes the next step."""
        return self.cluster.link.burst_s > _BURST * step_s

    def _run(self, plan: Plan, late: int | None) -> Timeline:
        timeline = self._step(plan).run(late)
        if self._bursts(timeline.step_s):
            timeline = self._step(plan, timeline.burst_s).run(late)
        if self._norms is not None:
            sent = (phase.traffic for phase in self._norms)
            crossing_s = timeline.crossing_s + sum(phase.alone_s for phase in self._norms)
            timeline = replace(
                timeline, traffics=(*timeline.traffics, *sent), crossing_s=crossing_s
            )
        return timeline

    def beside_s(self, main_s: float, lanes_s: float) -> float:
        """Return the least seconds of a main thread that shares its processors with lanes."""
        return max(main_s, (main_s + lanes_s) / self._speeds.processors)

    def lanes_s(self, plan: Plan) -> float:
        """Return the processor seconds of a rank's lanes to serve each site once."""
        return self._of_lanes_s(self.costs(plan))

    def _of_lanes_s(self, costs: Iterable[Cost]) -> float:
        return sum(cost.processor_s / self.cluster.core_part + cost.lane_s for cost in costs)

    def floor_s(self, plan: Plan) -> float:
        """Return the least seconds in any schedule of this plan: compute, or bytes at link rate.

        Compute is the main thread's. Where lanes share its processor, their compute and the
        processor time of bytes count too. A wait of the main thread costs at least its bytes.
        """
        costs = self.costs(plan)
        if self._state.phase is not None:
            costs.append(Cost(in_backward=self._state.phase))
        costs += [Cost(in_backward=phase) for phase in self._norms or ()]
        lanes_s = self._of_lanes_s(costs)
        updates, owned = {}, 0.0  # owned: a part of all bytes
        for choice in plan.choices:
            site = Site((choice.layer,), choice.strategy, choice.exchange)
            updates[choice.layer] = self.cost(site).update
            owned += self._compute.share(site) * bool(updates[choice.layer].lane)
        changes_s = sum(cost.forward_s + cost.backward_s for cost in costs)
        main_s = self._compute.forward_s + self._compute.backward_s + changes_s
        main_s += self._compute.own_update_s(updates)
        lanes_s += self._compute.update_bytes_s * owned / self.cluster.size
        compute_s = self.beside_s(main_s, lanes_s)
        return max(compute_s, self.cluster.link_s(total([cost.traffic for cost in costs])))


def _compute(profile: ModelProfile, norms: tuple[Phase, Phase] | None) -> Compute:
    """Return a step without traffic apart from norms over all ranks.

    The main thread waits for the norms. They are taken to be spread over the whole model, so that
    all its moments move by the same factor.
    """
    forward_s, backward_s = profile.forward_s, profile.backward_s
    if norms is not None:
        forward_s, backward_s = forward_s + norms[0].alone_s, backward_s + norms[1].alone_s
    later = forward_s / profile.forward_s if profile.forward_s else 1.0
    later_back = backward_s / profile.backward_s if profile.backward_s else 1.0
    in_forward = sorted(profile.layers, key=attrgetter("needed_s"))
    return Compute(
        forward_s,
        backward_s,
        needed_s=tuple((layer.name, layer.needed_s * later) for layer in in_forward),
        ready_s=tuple((layer.name, layer.ready_s * later_back) for layer in profile.layers),
        nbytes={layer.name: layer.nbytes for layer in profile.layers},
        counts={layer.name: len(layer.parameters) for layer in profile.layers},
        update=profile.update,
        update_bytes_s=profile.update_bytes_s,
    )
