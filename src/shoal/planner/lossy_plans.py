"""Lets allowed codecs into a plan that was found without them, if a loss is reached sooner by it.

    exact plan ─▶ with codec 1 ─▶ with codec 2 …     from the codec with the least error to the most

The time to a loss is the step, times the samples that the codec needs (learning.py). One that is
off by more must make it 10 % shorter than the plan before; else nothing of it is taken. Of those
that may be off by as much, the one with the shortest time to a loss is taken. Then
layer after layer goes back to what it was, the small ones first, where the step gets hardly longer:
what hides anyway stays exact. Embeddings stay exact, and layers without a parameter of two
dimensions. Costs a prediction for each bucket size and layer (of many layers the 96 largest), and
two for each way to carry codes, for each codec; each takes some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.codec import Codec
from shoal.contracts.strategy import Strategy
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.plan import Choice, Plan
from shoal.core.registry import of
from shoal.planner.learning import seconds_to_a_loss
from shoal.planner.options import known, resolve
from shoal.planner.search_options import Constraints, SearchOptions
from shoal.planner.timeline import Predictor, with_settings_of

WORTH = 0.1  # of the time to a loss: what a codec must gain
_LESS = 0.005  # of the step: what layers that go back may cost, all of them together
_MOST = 96  # layers that may go back, the largest
_VALUES = 1 << 20  # by which codecs are compared
_TABLES = ("Embedding", "EmbeddingBag")
_seconds = attrgetter("predicted_s")


def with_codecs(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    codecs: Sequence[str],
    constraints: Constraints,
    options: SearchOptions,
) -> Plan:
    """Return the plan, or one with codecs that reaches a loss in a tenth less time.

    Args:
        plan: the plan without codecs.
        profile: the model.
        cluster: the ranks, with the times of codecs.
        codecs: codecs that may be used, as plans write them.
        constraints: the limits that the plan must keep. Layers with pins stay as they are.
        options: sizes of buckets that are tried.
    """
    if cluster.ahead:
        return plan
    predictor = Predictor(with_settings_of(profile, plan), cluster)
    best, off_by = replace(plan, predicted_s=predictor.as_is(plan).step_s), -1.0
    for codec in sorted(map(read_codec, codecs), key=_off_by_and_bytes):
        allowed = _allowed_ways(predictor, codec, constraints)
        trial = _CodecTrial(
            predictor, plan, allowed, options.bucket_bytes, constraints.memory_limit
        )
        coded = trial.best()
        worth = WORTH if codec.most_error > off_by else 0.0
        if seconds_to_a_loss(coded) < seconds_to_a_loss(best) * (1 - worth):
            best, off_by = coded, codec.most_error
    return best


def _off_by_and_bytes(codec: Codec) -> tuple[float, int]:
    """Return a codec's largest error, and minus its bytes: codecs are tried in this order."""
    return codec.most_error, -codec.nbytes(_VALUES, 4)


def ways(predictor: Predictor, layer: LayerProfile, codec: Codec) -> list[Choice]:
    """Return the choices that serve a layer with a codec.

    They are each strategy and exchange that carries codes, and each that cuts the layer and may
    send its rows as codes.
    """
    if layer.kind in _TABLES:
        return []
    coded = any(p.is_real and len(p.shape) >= max(codec.least_dims, 1) for p in layer.parameters)
    able = [
        strategy
        for strategy, kind in of(Strategy).items()
        # a pipeline has one codec for all layers: dealt_plans.py
        if not kind.role.names_ranks and not predictor.refusal(layer, strategy)
    ]
    return [
        Choice(layer.name, strategy, f"{exchange}+{codec}")
        for strategy in able
        if coded and predictor.role(strategy).takes_exchange
        for exchange in predictor.coding_carriers(strategy, codec)
    ] + [
        Choice(layer.name, strategy, f"+{codec}")
        for strategy in able
        if codec.by_value and predictor.strategy(strategy).codes_rows
    ]


def _allowed_ways(
    predictor: Predictor, codec: Codec, constraints: Constraints
) -> dict[str, list[Choice]]:
    """Return the choices with a codec for each layer without a pin, among allowed strategies."""
    layers, strategies = predictor.profile.layers, known(constraints.strategies)
    pinned = resolve(constraints.pins or {}, [layer.name for layer in layers])
    return {
        layer.name: [way for way in ways(predictor, layer, codec) if way.strategy in strategies]
        for layer in layers
        if layer.name not in pinned
    }


class _CodecTrial:
    """A search for the layers of one plan that one codec should serve."""

    def __init__(
        self,
        predictor: Predictor,
        plan: Plan,
        allowed: Mapping[str, Sequence[Choice]],
        sizes: Sequence[int],
        memory_limit: float | None,
    ) -> None:
        self._predictor, self._exact = predictor, plan
        self._ways, self._sizes, self._limit = allowed, sizes, memory_limit

    def best(self) -> Plan:
        """Return the shortest plan: first all layers use the codec, then some turn exact again."""
        kinds = dict.fromkeys(
            (way.strategy, way.exchange) for own in self._ways.values() for way in own
        )
        starts = [self._all(kind, only) for kind in kinds for only in (True, False)]
        starts += [
            rows for plan in (self._exact, *starts) if (rows := self._with_rows(plan)) != plan
        ]
        tried = [self._predict(start) for start in starts]
        if not tried:
            return self._exact
        best = min(tried, key=seconds_to_a_loss)  # one codec may have two prices
        sized = [self._predict(replace(best, bucket_bytes=nbytes)) for nbytes in self._sizes]
        return self._with_less(min([best, *sized], key=_seconds))

    def _all(self, kind: tuple[str, str], only_carried: bool) -> Plan:
        """Change every layer that may change, or only the layers with gradients in buckets."""
        plan = self._exact
        for choice in self._exact.choices:
            carried = self._predictor.role(choice.strategy).takes_exchange
            way = Choice(choice.layer, *kind)
            if (carried or not only_carried) and way in self._ways.get(choice.layer, ()):
                plan = plan.with_choice(way)
        return self._mend(plan)

    def _with_rows(self, plan: Plan) -> Plan:
        """Keep layers cut as they are, but send their rows as codes."""
        for choice in plan.choices:
            for way in self._ways.get(choice.layer, ()):
                if way.without_codec() == choice and way.exchange.startswith("+"):
                    plan = plan.with_choice(way)
        return plan

    def _with_less(self, plan: Plan) -> Plan:
        """Turn layers exact again if that costs little, the smallest first."""
        before: Mapping[str, Choice] = {c.layer: c for c in self._exact.choices}
        layers = sorted(self._predictor.profile.layers, key=lambda layer: layer.nbytes)
        most_s = plan.predicted_s * (1 + _LESS)
        together = [[layer.name] for layer in layers[-_MOST:]]
        # tail hosts have one codec, so their layers change together
        at_tail = [name for (name,) in together if self._is_at_tail(plan.choice(name))]
        together = [names for names in together if names[0] not in at_tail] + [at_tail]
        for names in together:
            if any(plan.choice(name) != before[name] for name in names):
                other = plan
                for name in names:
                    other = other.with_choice(before[name])
                other = self._predict(self._mend(other))
                if other.predicted_s <= most_s:
                    plan = other
        return plan

    def _is_at_tail(self, choice: Choice) -> bool:
        return self._predictor.role(choice.strategy).is_at_tail

    def _mend(self, plan: Plan) -> Plan:
        """Return the plan with exact choices for layers that have lost the layer they need."""
        for name in self._predictor.lone(plan.choices):
            plan = plan.with_choice(self._exact.choice(name))
        return self._exact if self._predictor.lone(plan.choices) else plan

    def _predict(self, plan: Plan) -> Plan:
        if self._limit is not None:
            held = self._predictor.memory_bytes(plan.choices, plan.bucket_bytes, plan.lanes)
            if held > self._limit:
                plan = self._exact
        return replace(plan, predicted_s=self._predictor.as_is(plan).step_s)
