"""Chooses: the strategy of every layer, and the exchange and bucket size that carry the rest.

Coordinate descent on the predicted step. It starts from all layers in one strategy, for each that takes buckets, and
from each layer's cheapest choice alone; takes the layers one at a time, largest first, and keeps a change that makes
the step shorter; then the ways to carry the buckets; then the layers once more. A change must gain more than `_WORTH`
of the step, so that what hides anyway stays plain; a plan that cuts layers over ranks, which takes every rank to save
or evaluate, must gain `_CUT_WORTH`. In a model of many layers, small neighbours change together. Costs about layers ×
strategies × 6 predictions of some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from shoal import exchange as exchanges
from shoal import strategies as all_strategies
from shoal.core.buckets import BUCKETS_A_LANE, MEMORY
from shoal.core.contracts import Exchange, Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.names import matched
from shoal.core.placement import BALANCED, Placement, check_placement, owners_of
from shoal.core.plan import Choice, Plan, Site
from shoal.core.registry import found, named
from shoal.planner.timeline import Predictor

BUCKET_BYTES = tuple(mib << 20 for mib in (1, 2, 4, 8, 16, 25, 50, 100))
LANES = 3  # in flight at once: with one, the link idles between buckets
_LOW = 0.2  # of the model: what buckets that have memory at one time may be together, where memory is to be low
_MOST = 96  # layers that are decided about one by one
_FEWEST = 16  # groups of many
_WORTH = 0.002  # of the step: a smaller predicted gain is not worth a less plain choice
_CUT_WORTH = 0.05  # of the step: what a plan must gain if saving and evaluating are to take every rank
_OVER_WORTH = 100.0  # of the step: what keeping a limit of memory is worth, times what is over it
_LEAST_CUT_BYTES = 1 << 20  # of a layer that is cut unasked
_PLAIN = "replicate"
_START_BYTES = 4 << 20
_Carrier = tuple[dict[str, str], int, int]  # each bucketed strategy's exchange, bucket bytes, lanes


def search(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    pins: Mapping[str, str] | None = None,
    strategies: Iterable[str] | None = None,
    placement: Placement = BALANCED,
    stale: bool = False,
    memory: str = MEMORY[0],
    memory_limit: float | None = None,
) -> Plan:
    """The plan with the shortest predicted step that it finds.

    Args:
        profile: the model, as profiled.
        cluster: the ranks and their links.
        pins: by dotted layer name or glob, the strategy ("factor"), or strategy and exchange ("replicate:ring").
        strategies: names of those it may choose among; all by default.
        placement: who owns what, where layers are given to owners. A layer with a parameter that is given to a rank is
            served by what has owners.
        stale: the plan is for workers that run ahead of one another.
        memory: with "low", buckets are so small that those which have memory at one time make a fifth of the model.
        memory_limit: bytes that a rank may hold between steps: parameters, gradients, buckets and optimizer state.

    Raises:
        PlanError: a pin matches no layer, names nothing there is, or pins a layer to what refuses it; or a placement
            that cannot be; or no plan was found that keeps the limit of memory.
    """
    allowed = known(strategies)
    check_placement(placement, profile.names, cluster.size, len(cluster.servers), stale=stale)
    predictor = Predictor(profile.placed(owners_of(placement, profile.names)), cluster)
    pinned = resolve(pins or {}, [layer.name for layer in profile.layers])
    options = _options(predictor, allowed, pinned, every_cut=memory_limit is not None)
    limit = _LOW * profile.nbytes / (BUCKETS_A_LANE * LANES) if memory == "low" else BUCKET_BYTES[-1]
    sizes = [nbytes for nbytes in BUCKET_BYTES if nbytes <= limit] or [BUCKET_BYTES[0]]
    return replace(_Search(predictor, options, sizes, memory_limit).best(), placement=placement)


class _Search:
    """One descent; holds how buckets are carried, and each layer's strategy (with its own exchange, where pinned)."""

    def __init__(
        self,
        predictor: Predictor,
        options: dict[str, list[tuple[str, str]]],
        bucket_bytes: Sequence[int],
        memory_limit: float | None = None,
    ) -> None:
        self._predictor = predictor
        self._options = options
        self._bucket_bytes = bucket_bytes
        self._memory_limit = memory_limit
        self._order = [layer.name for layer in predictor.profile.layers]
        self._together = _neighbours(predictor.profile.layers, options)
        used = {strategy for own in options.values() for strategy, _ in own if predictor.bucketed(strategy)}
        self._exchanges = {strategy: predictor.carriers(strategy) for strategy in sorted(used)}
        first = {name: each[0] for name, each in self._exchanges.items()}
        self._start: _Carrier = (first, min(_START_BYTES, bucket_bytes[-1]), LANES)

    def best(self) -> Plan:
        """Descend from every start and keep the best end."""
        starts = [{name: self._cheapest(name) for name in self._order}]
        for strategy in reversed(self._exchanges):  # as much of one strategy as there can be
            kinds = {n: [o for o in options if o[0] == strategy] or options for n, options in self._options.items()}
            starts.insert(0, {name: options[0] for name, options in kinds.items()})
        ends = [self._descend(start) for i, start in enumerate(starts) if start not in starts[:i]]
        _, choices, bucket_bytes, lanes = min(ends, key=lambda end: end[0])
        cluster, profile = self._predictor.cluster, self._predictor.profile
        if self._over(choices, bucket_bytes, lanes):
            held = self._predictor.memory_bytes(choices, bucket_bytes, lanes)
            raise PlanError(
                "no plan was found that keeps the limit of memory",
                got=f"memory_limit={self._memory_limit:g}",
                expected=f"{held:.4g} bytes a rank, or more",
                do="take more ranks or an optimizer with less state; allow strategies that cut layers, and pin fewer",
            )
        step_s = self._predictor.predict(choices, bucket_bytes, lanes).step_s
        return Plan(cluster.size, profile.digest, tuple(choices), bucket_bytes, lanes, predicted_s=step_s)

    def _descend(self, picks: dict[str, tuple[str, str]]) -> tuple[float, list[Choice], int, int]:
        carrier = self._start
        best_s = self._step(picks, carrier)
        for _ in range(2):
            for names in self._together:
                for option in _common(names, self._options):
                    changed = {**picks, **dict.fromkeys(names, option)}
                    if changed != picks:
                        step_s = self._step(changed, carrier)
                        # a plainer choice may cost nothing; any other must be worth it
                        bar = best_s if option[0] == _PLAIN else best_s * (1 - _WORTH)
                        if step_s <= bar:
                            picks, best_s = changed, step_s
            for other in self._carriers():
                step_s = self._step(picks, other)
                if step_s < best_s * (1 - _WORTH):
                    carrier, best_s = other, step_s
        return best_s, self._choices(picks, carrier[0]), carrier[1], carrier[2]

    def _carriers(self) -> list[_Carrier]:
        combinations = [dict(zip(self._exchanges, each, strict=True)) for each in product(*self._exchanges.values())]
        return [(exchange, nbytes, LANES) for exchange in combinations for nbytes in self._bucket_bytes]

    def _choices(self, picks: Mapping[str, tuple[str, str]], carried: Mapping[str, str]) -> list[Choice]:
        return [
            Choice(name, strategy, own or carried.get(strategy, ""))
            for name in self._order
            for strategy, own in [picks[name]]
        ]

    def _step(self, picks: Mapping[str, tuple[str, str]], carrier: _Carrier) -> float:
        given = self._choices(picks, carrier[0]), carrier[1], carrier[2]
        worth = 1 + _CUT_WORTH if self._cuts(picks) else 1.0
        return self._predictor.predict(*given).step_s * worth * (1 + _OVER_WORTH * self._over(*given))

    def _over(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> float:
        """By how much a rank holds more than it may, as a part of the limit."""
        if self._memory_limit is None:
            return 0.0
        held = self._predictor.memory_bytes(choices, bucket_bytes, lanes)
        return max(0.0, held / self._memory_limit - 1)

    def _cuts(self, picks: Mapping[str, tuple[str, str]]) -> bool:
        return any(self._predictor.strategy(strategy).cuts for strategy, _ in picks.values())

    def _cheapest(self, name: str) -> tuple[str, str]:
        return min(self._options[name], key=lambda option: self._alone(name, option))

    def _alone(self, name: str, option: tuple[str, str]) -> float:
        strategy, own = option
        choice = Choice(name, strategy, own or self._start[0].get(strategy, ""))
        cost = self._predictor.cost(Site((name,), choice.strategy, choice.exchange))
        return self._predictor.alone_s(choice)[1] + cost.forward_s + cost.backward_s


def _neighbours(
    layers: Sequence[LayerProfile], options: Mapping[str, Sequence[tuple[str, str]]]
) -> list[tuple[str, ...]]:
    """The layers by name, largest first; of more than `_MOST` those that follow one another, have options in common and
    are small together come as one, in so few groups that their number times that of layers stays what it is."""
    limit, most = 0, min(_MOST, max(_FEWEST, _MOST**2 // max(len(layers), 1)))
    while True:
        groups: list[list[LayerProfile]] = []
        for layer in layers:
            last = groups[-1] if groups else []
            small = sum(other.nbytes for other in last) + layer.nbytes <= limit
            if last and small and _common([*(other.name for other in last), layer.name], options):
                last.append(layer)
            else:
                groups.append([layer])
        if len(groups) <= most or limit > sum(layer.nbytes for layer in layers):
            groups.sort(key=lambda group: -sum(layer.nbytes for layer in group))
            return [tuple(layer.name for layer in group) for group in groups]
        limit = max(2 * limit, 1 << 10)


def _common(names: Sequence[str], options: Mapping[str, Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What each of these layers may be served by."""
    return [option for option in options[names[0]] if all(option in options[name] for name in names)]


def _options(
    predictor: Predictor, allowed: Sequence[str], pinned: Mapping[str, tuple[str, str]], every_cut: bool
) -> dict[str, list[tuple[str, str]]]:
    """What each layer may be served by, as (strategy, its own exchange or ''), the plainest first."""
    options: dict[str, list[tuple[str, str]]] = {}
    for layer in predictor.profile.layers:
        if layer.name in pinned:
            strategy, exchange = pinned[layer.name]
            _check_pin(predictor, layer, strategy, exchange)
            options[layer.name] = [(strategy, exchange)]
            continue
        names = sorted((n for n in allowed if predictor.refusal(layer, n) is None), key=lambda n: n != _PLAIN)
        if not every_cut:
            names = _worth_trying(predictor, layer, names)
        if not names:
            reasons = "; ".join(f"{n}: {predictor.refusal(layer, n)}" for n in allowed)
            raise PlanError(
                f"no allowed strategy serves layer {layer.name}",
                got=reasons,
                do=f'add "{_PLAIN}" to strategies, which serves everything that is not given to a rank',
            )
        options[layer.name] = [(name, "") for name in names]
    return options


def _worth_trying(predictor: Predictor, layer: LayerProfile, names: Sequence[str]) -> list[str]:
    """Of the ways to cut the layer no more than the cheapest, and that if it may be worth it.

    They differ in what they send. All of it is waited for, and spares no more than what the layer costs otherwise.
    """
    whole = [name for name in names if not predictor.strategy(name).cuts]

    def seconds(name: str) -> float:
        cost = predictor.cost(Site((layer.name,), name, predictor.carriers(name)[0]))
        alone_s = cost.pace.wall.of(cost.traffic) + cost.lane_s + cost.forward_s + cost.backward_s
        return alone_s + predictor.update_s(layer) * cost.held

    cuts = sorted((name for name in names if name not in whole), key=seconds)
    if whole and cuts and (layer.nbytes < _LEAST_CUT_BYTES or seconds(cuts[0]) >= min(map(seconds, whole))):
        return whole
    return [*whole, *cuts[:1]]


def _check_pin(predictor: Predictor, layer: LayerProfile, strategy: str, exchange: str) -> None:
    reason = predictor.refusal(layer, strategy)
    if reason is None and exchange and not predictor.bucketed(strategy):
        reason = "it takes no exchange"
    if reason is None and exchange and not predictor.strategy(strategy).takes(named(exchanges, Exchange, exchange)):
        reason = f"{exchange} cannot carry it, but {', '.join(predictor.carriers(strategy))} can"
    if reason is not None:
        raise PlanError(
            f"{strategy} cannot serve layer {layer.name}: {reason}",
            where=f"pin of {layer.name}",
            do="pin the layer to another strategy, or leave it to the planner",
        )


def known(strategies: Iterable[str] | None) -> tuple[str, ...]:
    """The strategies that may be used, all by default (PlanError for a name that does not exist)."""
    if strategies is None:
        return tuple(found(all_strategies, Strategy))
    listed = [] if isinstance(strategies, str) else list(strategies)
    if not listed:
        raise PlanError("strategies is a list of names, at least one", got=repr(strategies), do='write ["replicate"]')
    return tuple(named(all_strategies, Strategy, name).name for name in listed)


def resolve(pins: Mapping[str, str], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Pins by layer name, of which there are `names`; a later pin wins over an earlier one."""
    resolved: dict[str, tuple[str, str]] = {}
    for pattern, value in pins.items():
        if not isinstance(value, str):
            raise PlanError(f"the pin of {pattern!r} is not a strategy's name", got=repr(value), do='write "factor"')
        strategy, _, exchange = value.partition(":")
        named(all_strategies, Strategy, strategy)
        if exchange:
            named(exchanges, Exchange, exchange)
        resolved |= dict.fromkeys(matched(pattern, names, "pin", "layer"), (strategy, exchange))
    return resolved


def repredicted(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """The same plan with the step time that is to be expected of it here."""
    placed = profile.placed(plan.owners(profile.names))
    timeline = Predictor(placed, cluster).predict(plan.choices, plan.bucket_bytes, plan.lanes)
    return replace(plan, predicted_s=timeline.step_s)
