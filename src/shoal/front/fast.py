"""`accuracy="fast"`: local steps in place of a plan, if a loss is reached sooner by them.

Layers must be free to be replicated: there are no pins, and no limit of memory. A feature that does
not go with local steps keeps them away, and then codecs are all that "fast" may choose. Guarded by
tests/front/test_fast.py.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.contracts.feature import PlanFacts, accepts, in_order
from shoal.core.placement import BALANCED
from shoal.core.plan import Plan
from shoal.features.local_steps import LocalSteps
from shoal.front.request import Request
from shoal.planner.local_ways import has_nothing_to_gain, soonest
from shoal.planner.options import PLAIN
from shoal.planner.plan_details import plan_for


def with_local_steps_if_sooner(plan: Plan, request: Request, facts: PlanFacts) -> Plan:
    """Return the plan, or one with local steps if `accuracy` allows them and a loss comes sooner.

    Args:
        plan: the plan that was found for steps which all ranks make together.
        request: the request.
        facts: facts with the profile and the cluster, as they were measured.
    """
    profile, cluster, options = facts.profile, facts.cluster, request.options
    assert profile is not None and cluster is not None
    if not _may(plan, request, facts) or has_nothing_to_gain(plan, profile):
        return plan
    replicated = plan_for(
        profile,
        cluster,
        strategies=[PLAIN],
        memory=options.memory,
        options=options.search_options,
    )
    total_steps = options.accuracy.total_steps
    found = soonest(plan, replicated, profile, cluster, total_steps)
    return found if accepts(found, with_local_steps_of(found, request).features, facts) else plan


def with_local_steps_of(plan: Plan, request: Request) -> Request:
    """Return the request with the feature of local steps that the plan has, if it has any."""
    chosen = LocalSteps.of_plan(plan)
    if chosen is None or any(isinstance(each, LocalSteps) for each in request.features):
        return request
    return replace(request, features=in_order([*request.features, chosen]))


def _may(plan: Plan, request: Request, facts: PlanFacts) -> bool:
    """Return whether local steps may be chosen here."""
    options = request.options
    free = not options.pins and options.memory_limit is None and options.placement == BALANCED
    return (
        options.accuracy.takes_local_steps
        and facts.topology.size > 1
        and not (facts.servers or facts.tail_hosts or plan.is_local)
        and free
        and options.micro_batches is None
        and PLAIN in request.usable
    )
