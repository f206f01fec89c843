"""Explains a plan: the cost of each layer and its alternatives, the reason, and the flip point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.feature import lines_of
from shoal.contracts.strategy import Strategy
from shoal.core.explanation import (
    Alternative,
    Explanation,
    LayerExplanation,
    PredictedStep,
    StationExplanation,
)
from shoal.core.facts import Cluster, LayerProfile, ModelProfile
from shoal.core.plan import Choice, Plan
from shoal.core.registry import of
from shoal.pipeline.prices import front_of, stations_at
from shoal.planner.holders import groups_in, holders_in, is_dealt, unasked_holders
from shoal.planner.learning import learning_line, product_line
from shoal.planner.local import explain_locally
from shoal.planner.lossy_plans import ways
from shoal.planner.options import PLAIN, known
from shoal.planner.search import CUT_WORTH, OTHER_WORTH
from shoal.planner.simpler_plans import lead_on
from shoal.planner.timeline import Predictor, with_settings_of

_MOST_COMPARED = 96  # layers; each alternative of each is a prediction of the whole step


def explain(
    plan: Plan, profile: ModelProfile, cluster: Cluster, *, alternatives: bool = True
) -> Explanation:
    """Return the plan with its reasons.

    Args:
        plan: for this model and this number of ranks.
        profile: the model, as profiled.
        cluster: the ranks and their links.
        alternatives: whether to compare other strategies for each layer. Of many layers only the 96
            largest are compared.

    Returns:
        One row a layer, and the predicted step by its parts.

    Examples:
        >>> import shoal, torch
        >>> from shoal.comm.threads import ThreadComm
        >>> from shoal.profiling.layers import profile_model
        >>> model, loss_fn = torch.nn.Linear(4, 2), torch.nn.MSELoss()
        >>> optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
        >>> sample = torch.ones(8, 4), torch.zeros(8, 2)
        >>> hosts = shoal.Topology(("one", "other"))
        >>> cluster = shoal.Cluster(hosts, shoal.Link(latency_s=1e-4, bytes_per_s=125e6))
        >>> plan = shoal.plan(model, loss_fn, optimizers, sample=sample, cluster=cluster)
        >>> profile = profile_model(model, loss_fn, optimizers, sample, ThreadComm())
        >>> [row.layer for row in explain(plan, profile, cluster).layers]
        ['(model)']
    """
    predictor = Predictor(with_settings_of(profile, plan), cluster)
    timeline = predictor.as_is(plan)
    backward_s = max(0.0, timeline.backward_s - timeline.crossing_s)
    # plans by local steps have none, and a pipeline serves all layers or none
    alternatives = alternatives and not plan.is_local and not is_dealt(plan)
    by_size = sorted(profile.layers, key=lambda layer: layer.nbytes, reverse=True)
    compared = {layer.name for layer in by_size[:_MOST_COMPARED]} if alternatives else set()
    explanation = Explanation(
        ranks=plan.ranks,
        rate_bytes_per_s=cluster.link.bytes_per_s,
        latency_s=cluster.link.latency_s,
        bucket_bytes=plan.bucket_bytes,
        lanes=plan.lanes,
        step=PredictedStep(
            # an outcome counts the same way: waits of the main thread are no compute
            forward_s=timeline.computed_s - backward_s,
            backward_s=backward_s,
            exposed_s=timeline.exposed_s,
            optimizer_s=timeline.optimizer_s,
            sent_bytes=timeline.sent_bytes,
            stations=_stations(plan, predictor, cluster),
            rival=_rival(plan, predictor, cluster),
        ),
        layers=tuple(
            _layer(plan, choice, predictor, timeline.step_s, choice.layer in compared)
            for choice in plan.choices
        ),
        placement=plan.placement,
        idle=_idle(plan, predictor, cluster),
        moving=profile.moving,
        norms=profile.norms,
        without_codecs=_without_codecs(plan, predictor),
        features=_lines(plan, profile, predictor),
    )
    return explain_locally(explanation, plan, profile) if plan.is_local else explanation


def _parts(plan: Plan) -> tuple[str, ...]:
    """Return a line that tells the parts of rows in a pipeline, if there are several."""
    if plan.micro_batches == 1 or not is_dealt(plan):
        return ()
    count = plan.ranks * plan.micro_batches
    return (f"rows of a rank go in {plan.micro_batches} parts: {count} micro-batches in all",)


def _sure(profile: ModelProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a line about the spread of the ranks' measurements, and the lead that decides."""
    if len(profile.rank_s) < 2 or not min(profile.rank_s):
        return ()
    least_s, most_s = min(profile.rank_s), max(profile.rank_s)
    return (
        f"measured: forward and backward take {1e3 * least_s:.1f} to {1e3 * most_s:.1f} ms by "
        f"rank; a simpler plan is taken if it is within {lead_on(cluster):.0%} of the fastest",
    )


def _lines(plan: Plan, profile: ModelProfile, predictor: Predictor) -> tuple[str, ...]:
    """Return the lines about the plan as a whole."""
    of_loss = _learning(plan, predictor)
    return _parts(plan) + lines_of(plan) + of_loss + _sure(profile, predictor.cluster)


def _learning(plan: Plan, predictor: Predictor) -> tuple[str, ...]:
    """Return lines about a lossy plan's price and its time to a loss; none if it is exact."""
    price, cluster, profile = learning_line(plan), predictor.cluster, predictor.profile
    if not price or plan.ranks == 1 or cluster.servers or cluster.tail:
        return price
    alone_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    return price + product_line(plan, _plain_s(plan, predictor), alone_s)


def _plain_s(plan: Plan, predictor: Predictor) -> float:
    """Return the step of the plan with all layers exact, in the plainest strategy."""
    exchange = predictor.carriers(PLAIN)[0]
    plain = tuple(Choice(choice.layer, PLAIN, exchange) for choice in plan.choices)
    exact = replace(plan.without_local_steps(), choices=plain)
    return predictor.as_is(exact).step_s


def _without_codecs(plan: Plan, predictor: Predictor) -> tuple[float, float] | None:
    """Return the step and bytes of the same plan without lossy codecs, if it has any."""
    bare = replace(plan, choices=tuple(choice.without_codec() for choice in plan.choices))
    if bare == plan:
        return None
    timeline = predictor.as_is(bare)
    return timeline.step_s, timeline.sent_bytes


def _idle(plan: Plan, predictor: Predictor, cluster: Cluster) -> tuple[str, ...]:
    """Name the servers, tail ranks or pipeline ranks that the plan has no use for."""
    if is_dealt(plan):
        groups = groups_in(plan)
        held = set(holders_in(plan).values() if groups is None else chain(*groups.groups))
        busy = range(cluster.size) if len(holders_in(plan)) < len(plan.choices) else ()
        hosts = enumerate(cluster.topology.hosts + cluster.tail)
        used = held.union(busy)
        return tuple(f"rank {rank} ({host})" for rank, host in hosts if rank not in used)
    chosen = [predictor.role(choice.strategy) for choice in plan.choices]
    is_used = any(role.takes_servers for role in chosen)
    # idle hosts come after the ones that train
    idle = () if is_used else cluster.servers + cluster.tail
    return tuple(f"rank {rank} ({host})" for rank, host in enumerate(idle, start=cluster.size))


def _stations(plan: Plan, predictor: Predictor, cluster: Cluster) -> tuple[StationExplanation, ...]:
    """Return the runs of layers that ranks hold in a pipeline."""
    if not is_dealt(plan):
        return ()
    holders, groups = holders_in(plan), groups_in(plan)
    rows = cluster.size // (1 if groups is None else groups.count)  # ranks with rows for a station
    layers = [layer for layer in predictor.profile.layers if layer.name in holders]
    front = front_of(layers, holders, cluster.size)
    stations = stations_at(layers, holders, front)
    before = [station.before_bytes * rows for station in stations]
    before = [before[0] if front else 0.0, *before[1:], 0.0]
    hosts, seen, found = (
        cluster.topology.hosts + cluster.tail,
        set[str](),
        list[StationExplanation](),
    )
    for station, (back_bytes, on_bytes) in zip(stations, pairwise(before), strict=True):
        own = tuple(dict.fromkeys(use.layer for use in station.uses))
        nbytes = sum(predictor.layer(name).nbytes for name in own if name not in seen)
        seen.update(own)
        group = (station.rank,) if groups is None else groups.group_of(station.rank)
        rank = _name_ranks(group, [hosts[each] for each in group])
        mean_bytes = 2 * nbytes * (len(group) - 1) / len(group)
        sent_bytes = on_bytes + back_bytes + mean_bytes
        found.append(
            StationExplanation(rank, own, nbytes, station.forward_s, station.backward_s, sent_bytes)
        )
    return tuple(found)


def _name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks that hold the same layers, and their hosts."""
    numbers = ", ".join(map(str, ranks))
    where = ", ".join(dict.fromkeys(hosts))
    return f"rank {numbers} ({where})" if len(ranks) == 1 else f"ranks {numbers} ({where})"


def _rival(plan: Plan, predictor: Predictor, cluster: Cluster) -> tuple[str, float] | None:
    """Return the plain plan as a pipeline's rival, and a pipeline as another plan's rival."""
    if cluster.size == 1 or not plan.in_step:
        return None
    if is_dealt(plan):
        exchange = predictor.carriers(PLAIN)[0]
        plain = [replace(c, strategy=PLAIN, exchange=exchange) for c in plan.choices]
        return f"{PLAIN}:{exchange} for all layers", predictor.as_is(
            replace(plan, choices=tuple(plain))
        ).step_s
    way = next(name for name, kind in of(Strategy).items() if kind.role.names_ranks)
    holders = unasked_holders(predictor, way)
    if holders is None:
        return None
    dealt = [Choice(c.layer, way, str(holders[c.layer])) for c in plan.choices]
    return f"a {way}", predictor.as_is(replace(plan, choices=tuple(dealt))).step_s


def _layer(
    plan: Plan, choice: Choice, predictor: Predictor, step_s: float, compared: bool
) -> LayerExplanation:
    layer = predictor.profile.layer(choice.layer)
    chosen = _alternative(plan, choice, predictor, step_s)
    alternatives = tuple(
        Alternative(other, 0.0, 0.0, 0.0, refusal)
        if (
            refusal := predictor.refusal(layer, other.strategy)
            or predictor.unasked(layer, other.strategy)
        )
        else _alternative(plan, other, predictor, None)
        for other in _choices(choice.layer, predictor)
        if compared and other != choice
    )
    return LayerExplanation(
        layer=layer.name,
        kind=layer.kind,
        parameters=sum(p.numel for p in layer.parameters),
        rows=layer.rows,
        backward_s=layer.backward_s,
        chosen=chosen,
        others=alternatives,
        reason=_reason(chosen, [other for other in alternatives if not other.refusal])
        if compared
        else "",
        flips=_flips(layer, predictor),
        forward_s=layer.forward_s,
        plain_bytes=2 * layer.nbytes * (plan.ranks - 1) / plan.ranks,
        exact_bytes=predictor.alone_s(choice.without_codec())[0],
    )


def _choices(name: str, predictor: Predictor) -> list[Choice]:
    exact = [
        Choice(name, strategy, exchange)
        for strategy in known(None)
        if not predictor.role(strategy).names_ranks
        for exchange in predictor.carriers(strategy)
    ]
    codecs = map(read_codec, predictor.cluster.codings)
    coded = [way for codec in codecs for way in ways(predictor, predictor.layer(name), codec)]
    return [*exact, *coded]


def _alternative(
    plan: Plan, choice: Choice, predictor: Predictor, step_s: float | None
) -> Alternative:
    sent, alone_s = predictor.alone_s(choice)
    if step_s is None:
        plan = plan.with_choice(choice)
        for other, needed in predictor.needs(choice.layer, choice.strategy).items():
            rows = choice.rows if needed == choice.strategy else ""
            plan = plan.with_choice(Choice(other, needed, rows))
        for other in predictor.lone(plan.choices):
            plan = plan.with_choice(_cheapest(other, predictor))
        step_s = predictor.as_is(plan).step_s
    return Alternative(choice, sent, alone_s, step_s)


def _cheapest(name: str, predictor: Predictor) -> Choice:
    """Return the search's choice for a layer that has lost the other half of its pair."""
    layer = predictor.layer(name)
    able = [
        choice
        for choice in _choices(name, predictor)
        if predictor.refusal(layer, choice.strategy) is None
        and predictor.unasked(layer, choice.strategy) is None
        and not choice.codec
    ]
    by_itself = [choice for choice in able if not predictor.needs(name, choice.strategy)]
    return min(by_itself, key=predictor.added_s)


def _reason(chosen: Alternative, alternatives: list[Alternative]) -> str:
    rivals = [
        other
        for other in alternatives
        if other.choice.strategy != chosen.choice.strategy
        # a lossy choice is no rival of an exact one
        and (chosen.choice.codec or not other.choice.codec)
    ]
    if not rivals:
        return "no other strategy serves it"
    rival = min(rivals, key=lambda other: other.step_s)
    name, gain_s = rival.choice.strategy, rival.step_s - chosen.step_s
    would = f"{name} would send {rival.sent_bytes / 1e6:.2f} MB"
    if abs(gain_s) < 0.005 * chosen.step_s:
        return f"{would} and take as long: it hides either way"
    if gain_s < -(CUT_WORTH + OTHER_WORTH) * chosen.step_s:
        saved = f"save {-gain_s * 1e3:.1f} ms a step"
        return f"pinned, edited, or not tried by the search: {would} and {saved}"
    if gain_s < 0:
        return f"{would} and save {-gain_s * 1e3:.1f} ms a step, too little to choose it unasked"
    return f"{would} and add {gain_s * 1e3:.1f} ms a step"


def _flips(layer: LayerProfile, predictor: Predictor) -> str:
    for name in of(Strategy):
        if predictor.refusal(layer, name) is None:
            rows = predictor.strategy(name).flips_at(layer, predictor.cluster.size)
            if rows is not None:
                return f"{name} sends less while K < {rows:.0f}"
    return ""
