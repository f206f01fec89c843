"""Plans in which ranks step by themselves: how many steps, and when weights are taken over.

"auto" is the fewest steps that take as long as the exchange of all weights. Then buckets take
turns, and each has the time of its turn and a step more to come back. Guarded by
tests/planner/test_local.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.contracts.exchange import SplitExchange
from shoal.core.cost import total
from shoal.core.explanation import Explanation
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.outer import Outer
from shoal.core.plan import Plan
from shoal.planner.timeline import Predictor


def with_local_steps(
    plan: Plan, profile: ModelProfile, cluster: Cluster, steps: int | str, outer: Outer | None
) -> Plan:
    """The plan in which ranks make so many steps by themselves.

    Args:
        plan: an exact one, of which every layer is replicated.
        profile: the model.
        cluster: the ranks and their links.
        steps: how many, or "auto".
        outer: the rule; None for the usual one.
    """
    outer = outer or Outer()
    predictor = Predictor(profile, cluster)
    choices = tuple(
        choice
        if isinstance(predictor.exchange(choice.exchange), SplitExchange)
        else replace(choice, exchange="direct" + "+" * bool(choice.codec) + choice.codec)
        for choice in plan.choices
    )
    plan = replace(plan, choices=choices)
    compute_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    exchange_s, num_buckets = _exchange_s(plan, predictor, cluster)
    if steps == "auto":
        steps = max(1, math.ceil(exchange_s / compute_s)) if compute_s else 1
        if outer.lag is None and exchange_s:
            outer = replace(outer, lag=min(steps, math.ceil(steps / num_buckets) + 1))
    assert isinstance(steps, int)
    outer = outer.on(plan.ranks)
    # with a lag each bucket has so many steps for itself, as buckets take turns
    hidden_s = (outer.lag or 0) * compute_s * num_buckets
    waits_s = max(0.0, exchange_s - hidden_s) / steps
    return replace(plan, local_steps=steps, outer=outer, predicted_s=compute_s + waits_s)


def explained_locally(explanation: Explanation, plan: Plan, profile: ModelProfile) -> Explanation:
    """The explanation of a plan's exact step, as that of a step of many."""
    compute_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    return replace(
        explanation,
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        exposed_s=max(0.0, plan.predicted_s - compute_s),
        optimizer_s=profile.optimizer_s,
        sent_bytes=explanation.sent_bytes / plan.local_steps,
        without_codecs=None,
        local=plan.locally,
    )


def _exchange_s(plan: Plan, predictor: Predictor, cluster: Cluster) -> tuple[float, int]:
    """Seconds in which all weights are exchanged once, and in how many buckets."""
    costs = predictor.costs(plan)
    lanes_s = sum(cost.alone_s for cost in costs) / min(plan.lanes, len(costs))
    return max(cluster.link_s(total([cost.traffic for cost in costs])), lanes_s), len(costs)
