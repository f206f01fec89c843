"""Chooses the strategy of every layer, and the exchange and bucket size that carry the rest.

The search is coordinate descent on the predicted step. It starts from all layers in one strategy,
for each strategy that takes buckets, and from each layer's cheapest choice alone. It takes the
layers one at a time, largest first, and keeps a change that makes the step shorter. Then it tries
pairs of layers, and the ways to carry buckets, and repeats all of it once. From the best end it
goes on: it changes two of the largest layers at once, and then one again.

A change must gain more than `_WORTH` of the step, so that layers with hidden exchanges stay plain.
A plan with layers that are cut over ranks must gain `CUT_WORTH`, because every rank has to take
part when it is saved or evaluated. A plan without a bucket on the library's own all-reduce must
gain `OTHER_WORTH`. In a model of many layers small neighbours change together. The cost is about
layers × strategies × 5 predictions of some milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf

from shoal.core.buckets import BUCKETS_A_LANE
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.placement import check_placement, owners_of
from shoal.core.plan import Choice, Plan
from shoal.planner.holders import with_holders
from shoal.planner.options import (
    PLAIN,
    Option,
    add_needed,
    common,
    known,
    options_of,
    resolve,
    with_pairs,
)
from shoal.planner.search_options import DEFAULT, UNCONSTRAINED, Constraints, SearchOptions
from shoal.planner.timeline import Predictor, with_settings_of

LANES = 3  # buckets in flight at once: with one, the link idles between buckets
# share of the model for all buckets in memory at one time, if memory is to be low
_LOW = 0.2
_FEWEST = 16  # fewest groups of layers, if many layers change in groups
_LARGEST = 4  # number of layers, the largest, that change in twos
_WORTH = 0.002  # share of the step: a smaller predicted gain is not worth a less plain choice
# share of the step that must be gained if no bucket goes by the library's own all-reduce
OTHER_WORTH = 0.04
# share of the step that a plan must gain if every rank has to take part in saving and evaluating
CUT_WORTH = 0.05
# penalty for exceeding a limit of memory, in steps: this times the exceeding share
_OVER_WORTH = 100.0
_ROUNDING = 1e-9  # relative rounding of compared seconds
_Carrier = tuple[dict[str, str], int, int]  # each strategy's exchange, bucket bytes, lanes
_End = tuple[float, dict[str, Option], _Carrier]  # a plan, with its step's seconds


def search(
    profile: ModelProfile,
    cluster: Cluster,
    constraints: Constraints = UNCONSTRAINED,
    options: SearchOptions = DEFAULT,
) -> Plan:
    """Search for the plan with the shortest predicted step, layer by layer.

    Args:
        profile: the model, as profiled.
        cluster: the ranks and their links.
        constraints: limits that the plan must keep.
        options: sizes of buckets, and other settings to try.

    Raises:
        PlanError: a pin matches no layer, has an unknown name, or names a strategy that refuses its
            layer; or the placement is impossible; or no plan was found within the memory limit.
    """
    allowed, placement = known(constraints.strategies), constraints.placement
    servers, stale = len(cluster.servers), cluster.ahead
    check_placement(placement, profile.names, cluster.size, servers, stale=stale)
    predictor = Predictor(profile.with_owners(owners_of(placement, profile.names)), cluster)
    pins = resolve(constraints.pins or {}, [layer.name for layer in profile.layers])
    pins = with_holders(pins, profile, cluster)
    pinned, limit = add_needed(predictor, pins, constraints.pins or {}), constraints.memory_limit
    roles = {name: predictor.role(name) for name in allowed}
    is_apart = any(predictor.role(way).names_ranks for way, _ in pins.values())
    each = [
        name
        for name, role in roles.items()
        if not role.names_ranks and not (is_apart and role.is_cut)
    ]
    choices = options_of(predictor, each, pinned, every_cut=limit is not None)
    choices, pairs = with_pairs(predictor, choices, each, pinned, every=limit is not None)
    options = within_memory(options, profile, constraints.memory)
    plan = _Descent(predictor, choices, options, limit, pairs).best()
    return replace(plan, placement=placement)


def within_memory(options: SearchOptions, profile: ModelProfile, memory: str) -> SearchOptions:
    """Return the options with bucket sizes that such a `memory` allows (see `Constraints`)."""
    if memory != "low":
        return options
    most_bytes = _LOW * profile.nbytes / (BUCKETS_A_LANE * LANES)
    return replace(options, bucket_bytes=options.sizes_within(most_bytes))


class _Descent:
    """One descent: how buckets are carried, and each layer's strategy and exchange."""

    def __init__(
        self,
        predictor: Predictor,
        options: dict[str, list[Option]],
        tried: SearchOptions,
        memory_limit: float | None = None,
        pairs: Sequence[dict[str, Option]] = (),
    ) -> None:
        self._predictor = predictor
        self._options = options
        self._tried = tried
        self._memory_limit = memory_limit
        self._order = [layer.name for layer in predictor.profile.layers]
        self._large = len(self._order) > tried.most_layers  # trying so many layers takes long
        self._together = _neighbours(predictor.profile.layers, options, tried.most_layers)
        self._pairs = pairs
        used = {
            strategy
            for own in options.values()
            for strategy, _ in own
            if predictor.role(strategy).takes_exchange
        }
        self._exchanges = {strategy: predictor.carriers(strategy) for strategy in sorted(used)}
        first = {name: carriers[0] for name, carriers in self._exchanges.items()}
        # several sizes may hold the whole model and so make the same buckets: keep the least of
        # them
        enough = [nbytes for nbytes in tried.bucket_bytes if nbytes >= predictor.profile.nbytes]
        self._sizes = [n for n in tried.bucket_bytes if not enough or n <= enough[0]]
        self._start: _Carrier = (first, min(tried.start_bytes, self._sizes[-1]), LANES)
        self._made: dict[tuple[str, str, str], Choice] = {}
        # different starts meet the same plans, so keep by numbers of choices the seconds, and
        # whether they are a lower limit only
        self._steps: dict[tuple[int, ...], tuple[float, bool]] = {}

    def best(self) -> Plan:
        """Descend from every start, and go on from the best end."""
        starts = [{name: self._cheapest(name) for name in self._order}]
        # prefer one strategy for as many layers as possible
        for strategy in reversed(self._exchanges):
            kinds = {
                n: [o for o in options if o[0] == strategy] or options
                for n, options in self._options.items()
            }
            starts.insert(0, {name: options[0] for name, options in kinds.items()})
        different = [start for i, start in enumerate(starts) if start not in starts[:i]]
        best = min(
            [
                self._descend(start, carrier)
                for start in different
                for carrier in self._carriers(start)
            ],
            key=lambda end: (
                end[0],
                [option[0] != PLAIN for option in end[1].values()].count(True),
            ),
        )
        _, picks, (exchange_of, bucket_bytes, lanes) = self._gone_on(best)
        choices = self._choices(picks, exchange_of)
        cluster, profile = self._predictor.cluster, self._predictor.profile
        if self._excess(choices, bucket_bytes, lanes):
            held = self._predictor.memory_bytes(choices, bucket_bytes, lanes)
            raise PlanError(
                "no plan was found that keeps the limit of memory",
                got=f"memory_limit={self._memory_limit:g}",
                expected=f"{held:.4g} bytes a rank, or more",
                do="take more ranks or an optimizer with less state; allow strategies that cut "
                "layers, and pin fewer",
            )
        least_part_bytes = self._tried.least_part_bytes
        step = self._predictor.predict(
            choices, bucket_bytes, lanes, least_part_bytes=least_part_bytes
        )
        plan = Plan(
            cluster.size,
            profile.digest,
            tuple(choices),
            bucket_bytes,
            lanes,
            predicted_s=step.step_s,
        ).with_periods(self._predictor.periods)
        return replace(plan, late=step.late, least_part_bytes=least_part_bytes)

    def _carriers(self, picks: dict[str, Option]) -> list[_Carrier]:
        """Return the best way to carry these picks and, in a small model, also the start's.

        If only the start's is tried, layers change because of its exchange alone, and do not change
        back one at a time.
        """
        _, carrier = self._choose_carrier(picks, self._start, self._step(picks, self._start))
        return [carrier] if self._large or carrier == self._start else [carrier, self._start]

    def _descend(self, picks: dict[str, Option], carrier: _Carrier) -> _End:
        end = self._step(picks, carrier), picks, carrier
        for _ in range(2):
            end = self._try_changes(end, self._changes())
        return end

    def _gone_on(self, end: _End) -> _End:
        """Change two of the largest layers at once, then one, as long as it gains."""
        before_s, end = end[0], self._change_two(end)
        while end[0] < before_s * (1 - _WORTH):
            before_s, end = end[0], self._try_changes(end, self._changes())
        return end

    def _try_changes(self, end: _End, changes: Iterable[dict[str, Option]]) -> _End:
        """Try these changes one by one, and then other ways to carry buckets."""
        best_s, picks, carrier = end
        for change in changes:
            changed = self._mend({**picks, **change})
            if changed != picks:
                # a plainer choice need only be as good; any other must be worth it
                plainer = all(strategy == PLAIN for strategy, _ in change.values())
                most_s = best_s if plainer else best_s * (1 - _WORTH)
                step_s = self._step(changed, carrier, most_s)
                if step_s <= most_s:
                    picks, best_s = changed, step_s
        best_s, carrier = self._choose_carrier(picks, carrier, best_s)
        return best_s, picks, carrier

    def _choose_carrier(
        self, picks: dict[str, Option], carrier: _Carrier, best_s: float
    ) -> tuple[float, _Carrier]:
        """Return the best step, with its bucket sizes and each strategy's exchange."""

        def carriers() -> Iterator[_Carrier]:
            for nbytes in self._sizes:
                yield carrier[0], nbytes, LANES
            for strategy, exchanges_of in self._exchanges.items():
                for exchange in exchanges_of:
                    yield {**carrier[0], strategy: exchange}, carrier[1], LANES

        for other in carriers():
            step_s = self._step(picks, other, best_s * (1 - _WORTH))
            if step_s < best_s * (1 - _WORTH):
                carrier, best_s = other, step_s
        return best_s, carrier

    def _changes(self) -> Iterator[dict[str, Option]]:
        """Yield changes to try, in order."""
        for names in self._together:
            for option in common(names, self._options):
                yield dict.fromkeys(names, option)
        yield from self._pairs

    def _change_two(self, end: _End) -> _End:
        """Change two of the largest layers at once, and in a small model the buckets, too."""
        changes = [
            dict.fromkeys(one, option) | dict.fromkeys(other, other_option)
            for one, other in combinations(self._together[:_LARGEST], 2)
            for option, other_option in product(
                common(one, self._options), common(other, self._options)
            )
        ]
        _, picks, (exchange_of, bucket_bytes, _) = end
        for nbytes in [bucket_bytes] if self._large else self._sizes:
            carrier = exchange_of, nbytes, LANES
            other_end = self._try_changes((self._step(picks, carrier), picks, carrier), changes)
            if other_end[0] < end[0] * (1 - _WORTH):
                end = other_end
        return end

    def _mend(self, picks: dict[str, Option]) -> dict[str, Option]:
        """Give layers without the partner that they need their cheapest choice."""
        lone = self._predictor.lone(Choice(name, strategy) for name, (strategy, _) in picks.items())
        return {**picks, **{name: self._cheapest(name) for name in lone}}

    def _choices(self, picks: Mapping[str, Option], carried: Mapping[str, str]) -> list[Choice]:
        made, choices = self._made, []
        for name in self._order:
            strategy, own = picks[name]
            key = name, strategy, own or carried.get(strategy, "")
            if key not in made:
                made[key] = Choice(*key)
            choices.append(made[key])
        return choices

    def _step(self, picks: Mapping[str, Option], carrier: _Carrier, most_s: float = inf) -> float:
        """Return the step's worth in seconds; above `most_s`, perhaps a smaller value above it."""
        tried = self._choices(picks, carrier[0]), carrier[1], carrier[2]
        key = (carrier[1], carrier[2], *map(id, tried[0]))
        known_s, may_be_more = self._steps.get(key, (0.0, True))
        if may_be_more and known_s <= most_s:
            times = self._worth(picks, carrier[0]) * (1 + _OVER_WORTH * self._excess(*tried))
            limit_s = most_s / times * (1 + _ROUNDING)
            least_part_bytes = self._tried.least_part_bytes
            step_s = self._predictor.step_s(*tried, least_part_bytes, limit_s)
            known_s = step_s * times
            self._steps[key] = known_s, step_s > limit_s
        return known_s

    def _excess(self, choices: Sequence[Choice], bucket_bytes: int, lanes: int) -> float:
        """Return by how much a rank exceeds the memory limit, as a share of the limit."""
        if self._memory_limit is None:
            return 0.0
        held = self._predictor.memory_bytes(choices, bucket_bytes, lanes)
        return max(0.0, held / self._memory_limit - 1)

    def _worth(self, picks: Mapping[str, Option], carried: Mapping[str, str]) -> float:
        """Return how many times as long a plain plan's step may take and still be as good."""
        exchanges = [
            own or carried[strategy]
            for strategy, own in picks.values()
            if self._predictor.role(strategy).takes_exchange
        ]
        other = sum(not self._predictor.native(exchange) for exchange in exchanges) / max(
            len(picks), 1
        )
        cut = any(self._predictor.role(strategy).is_cut for strategy, _ in picks.values())
        return (1 + OTHER_WORTH * other) * (1 + CUT_WORTH * cut)

    def _cheapest(self, name: str) -> Option:
        return min(self._options[name], key=lambda option: self._alone(name, option))

    def _alone(self, name: str, option: Option) -> float:
        strategy, own = option
        return self._predictor.added_s(
            Choice(name, strategy, own or self._start[0].get(strategy, ""))
        )


def _neighbours(
    layers: Sequence[LayerProfile], options: Mapping[str, Sequence[Option]], most_layers: int
) -> list[tuple[str, ...]]:
    """Group the layers by name, largest first.

    If there are more than `most_layers`, small neighbours with common options form one group. There
    are then so few groups that the number of groups times the number of layers stays the same.
    """
    limit, most = 0, min(most_layers, max(_FEWEST, most_layers**2 // max(len(layers), 1)))
    while True:
        groups: list[list[LayerProfile]] = []
        for layer in layers:
            last = groups[-1] if groups else []
            small = sum(other.nbytes for other in last) + layer.nbytes <= limit
            if last and small and common([*(other.name for other in last), layer.name], options):
                last.append(layer)
            else:
                groups.append([layer])
        if len(groups) <= most or limit > sum(layer.nbytes for layer in layers):
            groups.sort(key=lambda group: -sum(layer.nbytes for layer in group))
            return [tuple(layer.name for layer in group) for group in groups]
        limit = max(2 * limit, 1 << 10)


def predict_again(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan:
    """Return the plan with its step time as predicted here."""
    timeline = Predictor(with_settings_of(profile, plan), cluster).as_is(plan)
    return replace(plan, predicted_s=timeline.step_s)
