"""Settings of a found plan: codecs, chunks of rows, micro-batches.

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
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.plan import Plan
from shoal.core.registry import of
from shoal.planner.dealt_plans import dealing_of, is_dealt_alone
from shoal.planner.learning import seconds_to_a_loss
from shoal.planner.lossy_plans import with_codecs
from shoal.planner.options import micro_batches_of
from shoal.planner.search import CUT_WORTH, predict_again, search, within_memory
from shoal.planner.search_options import DEFAULT, Constraints, SearchOptions
from shoal.planner.simpler_plans import take_simpler

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
    """Return the plan that `search` finds, with codecs and chunks of rows.

    Args:
        profile: the model, as profiled in so many micro-batches.
        cluster: the ranks and their links.
        micro_batches: number of parts of each rank's batch, if that is asked for.
        options: settings to try.
        codecs: codecs that it may use, as plans write them.
        how: the fields of `Constraints`.
    """
    constraints = Constraints(**how)
    find = partial(_find, profile, cluster, options)
    finish = partial(_finish, profile, cluster, options)
    dealing = dealing_of(profile, cluster, constraints, micro_batches, codecs)
    if dealing is None:
        return finish(constraints, find(constraints, micro_batches), codecs)
    try:
        pinned = replace(constraints, pins=dealing.pins)
        dealt = finish(pinned, find(pinned, dealing.parts))
        pipeline = predict_again(dealt, profile, cluster)
    except PlanError:  # the limit of memory may allow no pipeline
        if is_dealt_alone(constraints):
            raise
        return finish(constraints, find(constraints, micro_batches), codecs)
    if is_dealt_alone(constraints):
        return pipeline
    try:
        found = find(constraints, micro_batches)
        plan = finish(constraints, found, codecs)
    except PlanError:
        if constraints.memory_limit is None:
            raise
        return pipeline
    if cluster.tail:  # these hosts are there to be used
        return pipeline if plan.predicted_s > (1 + CUT_WORTH) * pipeline.predicted_s else plan
    if _is_worth(pipeline, plan):
        return pipeline
    if codecs and _is_worth(pipeline, finish(constraints, found)):
        # exact training would take the pipeline, so codes must beat that
        return min(plan, pipeline, key=seconds_to_a_loss)
    return plan


def _is_worth(pipeline: Plan, plan: Plan) -> bool:
    """Return whether a pipeline is so much faster than another plan that it is taken unasked."""
    saved_s = plan.predicted_s - pipeline.predicted_s
    return plan.predicted_s > DEALT_WORTH * pipeline.predicted_s and saved_s > LEAST_SAVED_S


def _find(
    profile: ModelProfile,
    cluster: Cluster,
    options: SearchOptions,
    constraints: Constraints,
    micro_batches: int | None,
) -> Plan:
    """Return the plan that a search finds under these constraints."""
    found = partial(search, profile, cluster, options=options)
    made = take_simpler(found(constraints), cluster, constraints, found)
    ways = [choice.strategy for choice in made.choices]
    return replace(made, micro_batches=micro_batches_of(micro_batches, ways))


def _finish(
    profile: ModelProfile,
    cluster: Cluster,
    options: SearchOptions,
    constraints: Constraints,
    made: Plan,
    codecs: Sequence[str] = (),
) -> Plan:
    """Return a plan that was found, with codecs and chunks of rows."""
    if codecs:
        within = within_memory(options, profile, constraints.memory)
        made = with_codecs(made, profile, cluster, codecs, constraints, within)
    if any(of(Strategy)[choice.strategy].role.is_cut for choice in made.choices):
        made = min(
            (predict_again(replace(made, chunks=c), profile, cluster) for c in options.chunks),
            key=_with_chunks_s,
        )
    return made


def _with_chunks_s(plan: Plan) -> float:
    return plan.predicted_s * (1 + _CHUNKS_WORTH * (plan.chunks > 1))
