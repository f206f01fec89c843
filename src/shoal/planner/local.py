"""Plans with local steps: how many steps a round has, and when the mean of weights is taken over.

A given number of steps gets a lag where the link is slower than compute: if the exchange of all
weights lasts longer than a step. Training then goes on while weights are under way.

"auto" is the fewest steps that hide the exchange of all weights: they last as long, and its work
for processors that compute as well is a small part of theirs. Then buckets take turns, and each has
the time of its turn and a step more to come back. Where the ranks of a host step together, their
exchange is a part of the step: it is priced by the processor time of its bytes, as inside a host
nothing else holds them up. Guarded by tests/planner/test_local.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shoal.contracts.exchange import SplitExchange
from shoal.core.cost import Pace, Traffic, total
from shoal.core.explanation import Explanation, PredictedStep
from shoal.core.facts import Cluster, Link, ModelProfile, Topology
from shoal.core.outer_step import Outer
from shoal.core.plan import Choice, Plan
from shoal.exchange.hierarchical import Hierarchical
from shoal.planner.timeline import Predictor

_WORK = 0.05  # of a step that "auto" lets exchanges add
_LEAST_S = 0.1  # shortest exchange that a lag hides: less may be noise


def with_local_steps(
    plan: Plan, profile: ModelProfile, cluster: Cluster, steps: int | str, outer: Outer | None
) -> Plan:
    """Return the plan with so many local steps in a round.

    Args:
        plan: an exact plan that replicates every layer.
        profile: the model.
        cluster: the ranks and their links.
        steps: the number of steps, or "auto".
        outer: the rule; None for the usual one.
    """
    outer = outer or Outer()
    known = outer.on(cluster.topology)
    predictor = Predictor(profile, cluster)
    # the link of a host serves all its ranks
    split = "hierarchical" if Hierarchical().fits(cluster.topology) else "direct"
    choices = tuple(
        choice
        if isinstance(predictor.exchange(choice.exchange), SplitExchange)
        else replace(choice, exchange=split + "+" * bool(choice.codec) + choice.codec)
        for choice in plan.choices
    )
    plan = replace(plan, choices=choices)
    step_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    if known.islands:
        step_s = max(step_s, _island_s(plan, profile, cluster))
    exchange_s, num_buckets = exchange_of(plan, predictor, cluster)
    if outer.quorum is not None:
        exchange_s = _by_first_rank_s(profile.nbytes, cluster)
    lanes_s = predictor.lanes_s(plan)
    is_auto = steps == "auto"
    if is_auto:
        steps = max(1, math.ceil(exchange_s / step_s)) if step_s else 1
        while step_s and predictor.beside_s(step_s, lanes_s / steps) > step_s * (1 + _WORK):
            steps += 1
    assert isinstance(steps, int)
    waits = exchange_s > 0 if is_auto else exchange_s > max(step_s, _LEAST_S)
    if outer.lag is None and waits and (is_auto or not cluster.servers) and outer.quorum is None:
        turn_steps = max(steps, exchange_s / step_s if step_s else 0.0) / num_buckets
        outer = replace(outer, lag=min(steps, math.ceil(turn_steps) + 1))
    outer = replace(outer, momentum=known.momentum, lag=outer.lag or 0)
    if outer.lag:  # without a lag main threads wait while lanes work, which waits_s has
        step_s = predictor.beside_s(step_s, lanes_s / steps)
    # with a lag each bucket has so many steps for itself, as buckets take turns
    hidden_s = (outer.lag or 0) * step_s * num_buckets
    waits_s = max(0.0, exchange_s - hidden_s) / steps
    return replace(plan, local_steps=steps, outer=outer, predicted_s=step_s + waits_s)


def explain_locally(explanation: Explanation, plan: Plan, profile: ModelProfile) -> Explanation:
    """Turn the explanation of an exact step into one of local steps."""
    compute_s = profile.forward_s + profile.backward_s + profile.optimizer_s
    return replace(
        explanation,
        step=PredictedStep(
            forward_s=profile.forward_s,
            backward_s=profile.backward_s,
            exposed_s=max(0.0, plan.predicted_s - compute_s),
            optimizer_s=profile.optimizer_s,
            sent_bytes=explanation.step.sent_bytes / plan.local_steps,
        ),
        without_codecs=None,
        local=plan.locally,
    )


def _island_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Return the seconds of a step in which the ranks of the fullest host exchange gradients."""
    ranks, moved = cluster.topology.ranks_per_host, cluster.pace("direct").cpu
    island = Cluster(
        Topology(("host",) * ranks),
        Link(0.0, math.inf, cluster.link.cpu_s_per_byte),
        cluster.cores_per_rank,
        {"direct": Pace(moved, moved)},
        pack_byte_s=cluster.pack_byte_s,
        pack_each_s=cluster.pack_each_s,
    )
    choices = tuple(Choice(choice.layer, "replicate", "direct") for choice in plan.choices)
    exact = replace(plan, ranks=ranks, choices=choices)
    return Predictor(profile, island).as_is(exact).step_s


def _by_first_rank_s(nbytes: float, cluster: Cluster) -> float:
    """Return the seconds in which all ranks send rank 0 so many bytes, and get as many back."""
    topology = cluster.topology
    others = range(1, topology.size)
    nothing = [0.0 for _ in others]
    apart = sum(topology.apart(0, rank) for rank in others)
    back = Traffic(
        (nbytes * len(others), *nothing),
        (0.0, *(nbytes for _ in others)),
        rounds=1,
        leaving=(nbytes * apart, *nothing),
    )
    return 2 * cluster.link_s(back)


def exchange_of(plan: Plan, predictor: Predictor, cluster: Cluster) -> tuple[float, int]:
    """Return the seconds to exchange all weights once, and the number of buckets."""
    costs = predictor.costs(plan)
    lanes_s = sum(cost.alone_s for cost in costs) / min(plan.lanes, len(costs))
    return max(cluster.link_s(total([cost.traffic for cost in costs])), lanes_s), len(costs)
