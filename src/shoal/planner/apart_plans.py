"""Plans in which hosts that bring no rows hold the end of the model.

Each place in the order of forward is tried: layers from there on go to these hosts, in runs. Layers
before it stay with the ranks that train. A cheap price of the whole step finds the best place, then
the number of parts of rows. The search then finds the ways of the layers before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shoal.contracts.state import OF_LOSS
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile
from shoal.core.plan import Choice, Plan
from shoal.pipeline.route import EACH
from shoal.pipeline.uses import UseFacts, uses_of
from shoal.planner.holders import check_cuts, home_of, in_runs
from shoal.planner.options import PLAIN
from shoal.planner.timeline import Predictor, with_settings_of

Held = dict[str, int]  # the host of each layer of an end, as its rank
_MOST_PLACES = 24
_SLACKS = (1.0, 1.5)
_BUCKET_BYTES, _LANES = 4 << 20, 3


def ends_of(predictor: Predictor, way: str) -> Iterator[Held]:
    """Yield ends of the model that hosts without rows can hold, and the host of each layer.

    Args:
        predictor: the model's predictor.
        way: the name of the strategy.
    """
    profile, cluster = predictor.profile, predictor.cluster
    others = cluster.servers or cluster.ahead or predictor.periods
    state = profile.local or any(moving.name.startswith(OF_LOSS) for moving in profile.moving)
    if others or state or not cluster.tail:
        return
    if any(predictor.refusal(each, way) or predictor.unasked(each, way) for each in profile.layers):
        return
    uses = uses_of(profile.layers)
    firsts = {use.layer: use for use in reversed(uses)}
    seconds = dict.fromkeys((use.layer for use in uses), 0.0)
    for use in uses:
        seconds[use.layer] += use.forward_s + use.backward_s
    order = [*seconds]
    ties = {each.name: each.measured(UseFacts).with_layer or each.name for each in profile.layers}
    for place in _places(len(order)):
        chain = [(seconds[name], firsts[name].before_bytes) for name in order[place:]]
        for count in sorted({1, min(len(cluster.tail), len(chain))}):
            for runs in in_runs(chain, [1.0] * count, _SLACKS[: 1 + (count > 1)]):
                hosts = dict(zip(order[place:], runs, strict=True))
                held = {
                    name: cluster.size + hosts[tie] for name, tie in ties.items() if tie in hosts
                }
                if _can_be(profile, held):
                    yield held


def _places(count: int) -> Sequence[int]:
    """Return places between layers, evenly spread if there are many."""
    step = max(1, -(-(count - 1) // _MOST_PLACES))
    return range(count - 1, 0, -step)


def _can_be(profile: ModelProfile, held: Held) -> bool:
    """Return whether cuts and buffers allow that hosts hold these layers."""
    holders = dict.fromkeys(profile.names, EACH) | held
    try:
        check_cuts(profile, held)
        for state in profile.moving:
            home_of(state.name, holders)
    except PlanError:
        return False
    return True


def step_with(
    profile: ModelProfile, cluster: Cluster, way: str, held: Mapping[str, str], parts: int
) -> float:
    """Return the predicted step if hosts hold these layers, and all others are replicated.

    Args:
        profile: the model.
        cluster: the ranks.
        way: the strategy of the layers that hosts hold.
        held: the host of each of them, as a plan writes it.
        parts: parts of each rank's rows.
    """
    plain = Predictor(profile, cluster).carriers(PLAIN)[0]
    choices = tuple(
        Choice(name, way, held[name]) if name in held else Choice(name, PLAIN, plain)
        for name in profile.names
    )
    plan = Plan(cluster.size, profile.digest, choices, _BUCKET_BYTES, _LANES, micro_batches=parts)
    return Predictor(with_settings_of(profile, plan), cluster).as_is(plan).step_s
