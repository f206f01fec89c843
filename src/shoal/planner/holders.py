"""Which rank holds which layers of a pipeline: runs of layers, of about the same time.

A pin "pipeline" leaves it to this; "pipeline:2" names the rank. The slowest rank has as little to
do as any division into runs allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import ModelProfile
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.strategies.pipeline import TieFacts

Option = tuple[str, str]  # a strategy, and its own exchange or ''


def with_holders(
    pins: Mapping[str, Option], profile: ModelProfile, ranks: int
) -> dict[str, Option]:
    """Return the pins, in which each layer of a pipeline has its rank.

    Raises:
        PlanError: some layers are in a pipeline, and others are not; or only some name a rank.
    """
    held = [name for name, (way, _) in pins.items() if named(Strategy, way).role.names_ranks]
    if not held:
        return dict(pins)
    way = pins[held[0]][0]
    if rest := [name for name in profile.names if name not in held]:
        raise PlanError(
            f"{way} serves all layers of a model, or none",
            where=f"layer {rest[0]}",
            got=f"{len(held)} of {len(profile.names)} layers",
            do=f'pin all of them: pins={{"*": "{way}"}}',
        )
    unnamed = [name for name in held if not pins[name][1]]
    if not unnamed:
        return dict(pins)
    if len(unnamed) < len(held):
        raise PlanError(
            f"some layers of the {way} name a rank, and others do not",
            where=f"layer {unnamed[0]}",
            do=f'name a rank for each layer ("{way}:0"), or for none',
        )
    return {name: (way, str(rank)) for name, rank in holders_of(profile, ranks).items()}


def holders_of(profile: ModelProfile, ranks: int) -> dict[str, int]:
    """Return a rank for each layer. Layers that use one parameter have one rank."""
    ties = {layer.name: layer.measured(TieFacts).with_layer for layer in profile.layers}
    seconds: dict[str, float] = {}
    for layer in reversed(profile.layers):  # in the order of forward
        name = ties[layer.name] or layer.name
        seconds[name] = seconds.get(name, 0.0) + layer.forward_s + layer.backward_s
    runs = dict(zip(seconds, in_runs([*seconds.values()], ranks), strict=True))
    return {layer.name: runs[ties[layer.name] or layer.name] for layer in profile.layers}


def in_runs(seconds: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each of some layers in a row, such that the longest run is shortest.

    Every rank has a layer, if there are enough of them.

    Examples:
        >>> in_runs([1.0, 1.0, 1.0, 3.0], ranks=2)
        [0, 0, 0, 1]
    """
    count, runs = len(seconds), min(ranks, len(seconds))
    ends = [0.0]
    for each in seconds:
        ends.append(ends[-1] + each)
    # best[i]: the longest run of the first i layers, and where the last of these runs begins
    best = [(0.0, 0), *((float("inf"), 0) for _ in seconds)]
    begins: list[list[int]] = []
    for _ in range(runs):
        best = [(float("inf"), 0)] + [
            min((max(best[begin][0], ends[end] - ends[begin]), begin) for begin in range(end))
            for end in range(1, count + 1)
        ]
        begins.append([begin for _, begin in best])
    found, end = [0] * count, count
    for rank in reversed(range(runs)):
        begin = begins[rank][end]
        found[begin:end] = [rank] * (end - begin)
        end = begin
    return found


def is_priced(plan: Plan) -> bool:
    """Return whether a plan's step can be predicted: that of a pipeline is not, yet."""
    ways = {choice.strategy for choice in plan.choices}
    return not any(named(Strategy, way).role.names_ranks for way in ways)
