"""Settings of a found plan: chunks, micro-batches at the tail, and how tail hosts share layers.

Tail hosts have a plan within the plan, because they are a job of their own. Each has the rows of
its workers, W/T times one worker's rows, and its layers are served as in any job.

The best plan of a search competes with a plan that gives each layer to a rank: a pipeline. The
pipeline wins if its step is `DEALT_WORTH` times as short, because no rank of it can evaluate or
save alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, Excerpt, ModelProfile, Topology
from shoal.core.plan import Plan
from shoal.core.registry import named, of
from shoal.core.way import rows_and_rest
from shoal.planner.dealt_plans import dealing_of, is_dealt_alone
from shoal.planner.lossy_plans import with_codecs
from shoal.planner.options import micro_batches_of
from shoal.planner.search import CUT_WORTH, predict_again, search, within_memory
from shoal.planner.search_options import DEFAULT, Constraints, SearchOptions
from shoal.planner.simpler_plans import take_simpler
from shoal.profiling.tails import tail_of

# how many times as fast a pipeline must be, and the seconds that it must save
DEALT_WORTH, LEAST_SAVED_S = 1.3, 0.02
_CHUNKS_WORTH = 0.01  # share of the step that more than one chunk must save


def plan_for(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    micro_batches: int | None = None,
    options: SearchOptions = DEFAULT,
    codecs: Sequence[str] = (),
    **how: Any,
) -> Plan:
    """Return the plan that `search` finds, with codecs, chunks of rows, and shares of tail hosts.

    Args:
        profile: the model, as profiled in so many micro-batches.
        cluster: the ranks and their links.
        micro_batches: number of parts of each rank's batch, if that is asked for.
        options: settings to try.
        codecs: codecs that it may use, as plans write them.
        how: the fields of `Constraints`.
    """
    constraints = Constraints(**how)
    make = partial(_plan_under, profile, cluster, options)
    dealing = dealing_of(profile, cluster, constraints, micro_batches, codecs)
    if dealing is None:
        return make(micro_batches, codecs, constraints)
    try:
        dealt = make(dealing.parts, (), replace(constraints, pins=dealing.pins))
        pipeline = predict_again(dealt, profile, cluster)
    except PlanError:  # the limit of memory may allow no pipeline
        if is_dealt_alone(constraints):
            raise
        return make(micro_batches, codecs, constraints)
    if is_dealt_alone(constraints):
        return pipeline
    try:
        plan = make(micro_batches, codecs, constraints)
    except PlanError:
        if constraints.memory_limit is None:
            raise
        return pipeline
    saved_s = plan.predicted_s - pipeline.predicted_s
    if cluster.tail:  # these hosts are there to be used
        return pipeline if plan.predicted_s > (1 + CUT_WORTH) * pipeline.predicted_s else plan
    is_worth = plan.predicted_s > DEALT_WORTH * pipeline.predicted_s and saved_s > LEAST_SAVED_S
    return pipeline if is_worth else plan


def _plan_under(
    profile: ModelProfile,
    cluster: Cluster,
    options: SearchOptions,
    micro_batches: int | None,
    codecs: Sequence[str],
    constraints: Constraints,
) -> Plan:
    """Return the plan that a search finds under these constraints, with all other settings."""
    found = partial(search, profile, cluster, options=options)
    made = take_simpler(found(constraints), cluster, constraints, found)
    ways = [choice.strategy for choice in made.choices]
    made = replace(made, micro_batches=micro_batches_of(micro_batches, ways))
    if codecs:
        within = within_memory(options, profile, constraints.memory)
        made = with_codecs(made, profile, cluster, codecs, constraints, within)
    if any(of(Strategy)[choice.strategy].role.is_cut for choice in made.choices):
        made = min(
            (predict_again(replace(made, chunks=c), profile, cluster) for c in options.chunks),
            key=_with_chunks_s,
        )
    if cluster.tail:
        made = min(
            (predict_again(replace(made, joined=j), profile, cluster) for j in options.joined),
            key=_predict,
        )
    return with_sharing(made, profile, cluster, options)


def with_sharing(
    plan: Plan, profile: ModelProfile, cluster: Cluster, options: SearchOptions = DEFAULT
) -> Plan:
    """Add the strategy by which tail hosts share each of their layers, in its choice's `exchange`.

    Raises:
        PlanError: the plan names an impossible one.
    """
    kinds = of(Strategy)
    at_tail = [choice for choice in plan.choices if kinds[choice.strategy].role.is_at_tail]
    ways = {choice.layer: rows_and_rest(choice.exchange)[1] for choice in at_tail}
    pinned = {layer: way for layer, way in ways.items() if way}
    if len(cluster.tail) < 2:
        if pinned:
            layer, way = next(iter(pinned.items()))
            do = 'pin it to "stage" alone, or take more tail hosts'
            raise PlanError(
                f"one tail host shares layer {layer} with nobody", got=f"stage:{way}", do=do
            )
        return plan
    if not at_tail:
        return plan
    tail = tail_of(profile.layer(choice.layer) for choice in at_tail)
    assert tail is not None, "a layer is at the tail that is in no end of the model"
    end = profile.excerpt(Excerpt(tail.layers, rows=cluster.size / len(cluster.tail)))
    hosts = replace(cluster, topology=Topology(cluster.tail), tail=(), servers=())
    usable = [name for name, kind in kinds.items() if kind.role.fits_tail_hosts]
    for layer, way in pinned.items():
        strategy = named(Strategy, way.partition(":")[0])
        reason = "it takes hosts of its own" if strategy.name not in usable else None
        reason = reason or strategy.refusal(end.layer(layer), hosts)
        if reason is not None:
            raise PlanError(
                f"tail hosts cannot share layer {layer} so: {reason}",
                got=f"stage:{way}",
                expected=", ".join(usable),
            )
    inner = search(end, hosts, Constraints(pins=pinned, strategies=usable), options)
    for choice in inner.choices:
        before = plan.choice(choice.layer)
        way = f"{before.rows}:{choice.way}" if before.rows else choice.way
        plan = plan.with_choice(replace(before, exchange=way))
    return plan


def _with_chunks_s(plan: Plan) -> float:
    return plan.predicted_s * (1 + _CHUNKS_WORTH * (plan.chunks > 1))


def _predict(plan: Plan) -> float:
    return plan.predicted_s
