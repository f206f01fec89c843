"""The rank of each layer of a pipeline: runs of layers, such that the step is short.

A pin "pipeline" leaves it to this; "pipeline:2" names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.contracts.state import OF_LOSS
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Cluster, ModelProfile, Setting
from shoal.core.plan import Plan
from shoal.core.rank_groups import RankGroups
from shoal.core.registry import named
from shoal.core.way import ranks_in, rows_and_rest
from shoal.pipeline.prices import (
    WHOLE,
    RowPassage,
    StationUses,
    least_s,
    stations_at,
    stations_of,
    step_of,
)
from shoal.pipeline.route import EACH
from shoal.pipeline.uses import NO_CUT, UseFacts, uses_of
from shoal.planner.timeline import Predictor
from shoal.strategies.carrier_terms import check_beside_holders, check_holder
from shoal.strategies.pipeline import passage_of
from shoal.strategies.row_parts import RowFacts

Option = tuple[str, str]  # a strategy, and its own exchange or ''
_SLACKS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)
_ROUNDING = 1e-9
_FEW = 9  # number of ranks: below it, each number of them is tried
_SIMULATED = 8  # number of cuts into runs that are simulated, of all that are found
# number of ranks: with more, a simulation takes long, because each has a micro-batch
_MOST_RANKS = 64


def unasked_holders(
    predictor: Predictor, way: str, passage: RowPassage = WHOLE
) -> dict[str, int] | None:
    """Return a rank for each layer of a pipeline that the user has not asked for.

    Some ranks may have no layers. Return None if a pipeline cannot serve the model, or would change
    more than a step's length, for instance because of servers, or buffers of each rank's own.

    Args:
        predictor: the model's predictor, on these ranks.
        way: the name of the strategy.
        passage: the way of rows through it.
    """
    profile, cluster = predictor.profile, predictor.cluster
    others = cluster.servers or cluster.tail or cluster.ahead or predictor.periods
    state = profile.local or any(moving.name.startswith(OF_LOSS) for moving in profile.moving)
    if others or state or not 1 < cluster.size <= _MOST_RANKS:
        return None
    if any(predictor.refusal(each, way) or predictor.unasked(each, way) for each in profile.layers):
        return None
    counts = {2**power for power in range(cluster.size.bit_length())}
    return holders_of(profile, cluster, [*counts, *range(1, _FEW), cluster.size], passage)


def with_holders(
    pins: Mapping[str, Option], profile: ModelProfile, cluster: Cluster
) -> dict[str, Option]:
    """Return the pins, in which each layer of a pipeline has its rank.

    Raises:
        PlanError: some layers are in a pipeline, and others are not; or only some name a rank.
    """
    held = [name for name, (way, _) in pins.items() if named(Strategy, way).role.names_ranks]
    if not held:
        return dict(pins)
    way = pins[held[0]][0]
    rest = [name for name in profile.names if name not in held]
    pins = {**pins, **_dealt_apart(held, pins, profile, cluster)}
    if rest and not _are_apart([pins[name][1] for name in held], cluster):
        raise PlanError(
            f"{way} serves all layers of a model, or none",
            where=f"layer {rest[0]}",
            got=f"{len(held)} of {len(profile.names)} layers",
            do=f'pin all of them: pins={{"*": "{way}"}}',
        )
    check_beside_holders({name: way for name, (way, _) in pins.items() if name not in held})
    codec = _codec_of(way, [pins[name][1] for name in held])
    named_ranks = {name: rows_and_rest(pins[name][1])[1] for name in held}
    unnamed = [name for name in held if not named_ranks[name]]
    if not unnamed:
        for name in held:
            check_holder(name, way, pins[name][1], cluster.size + len(cluster.tail))
        groups = {name: ranks_in(ranks) for name, ranks in named_ranks.items()}
        RankGroups.of(groups.values(), cluster.size)
        check_cuts(profile, {name: ranks[0] for name, ranks in groups.items()})
        return dict(pins)
    if len(unnamed) < len(held):
        raise PlanError(
            f"some layers of the {way} name a rank, and others do not",
            where=f"layer {unnamed[0]}",
            do=f'name a rank for each layer ("{way}:0"), or for none',
        )
    facts = profile.layers[0].measured(RowFacts)
    passage = passage_of(Setting(codec=codec), facts, cluster)
    holders = holders_of(profile, cluster, passage=passage)
    check_cuts(profile, holders)
    before = f"+{codec}:" if codec else ""
    return {name: (way, f"{before}{rank}") for name, rank in holders.items()}


def _codec_of(way: str, exchanges: Iterable[str]) -> str:
    """Return the one codec of all layers of a pipeline; '' for none.

    Raises:
        PlanError: they have several.
    """
    if len(codecs := {rows_and_rest(exchange)[0] for exchange in exchanges}) > 1:
        raise PlanError(
            f"what crosses in a {way} has one codec, or none",
            got=" and ".join(sorted(codec or "none" for codec in codecs)),
            do=f'write the same of each layer: pins={{"*": "{way}+{max(codecs)}"}}',
        )
    return codecs.pop()


def _dealt_apart(
    held: Sequence[str], all_pins: Mapping[str, Option], profile: ModelProfile, cluster: Cluster
) -> dict[str, Option]:
    """Return pins of some layers, dealt in the order of forward to the hosts that bring no rows.

    Pins that name ranks stay as they are. If all layers are held, the ranks that train hold them.
    """
    pins = {name: all_pins[name] for name in held}
    is_named = any(rows_and_rest(exchange)[1] for _, exchange in pins.values())
    if is_named or not cluster.tail or len(held) == len(profile.names):
        return pins
    uses = [use for use in uses_of(profile.layers) if use.layer in pins]
    seconds = dict.fromkeys((use.layer for use in uses), 0.0)
    firsts = {use.layer: use for use in reversed(uses)}
    for use in uses:
        seconds[use.layer] += use.forward_s + use.backward_s
    chain = [(seconds[name], firsts[name].before_bytes) for name in seconds]
    count = min(len(cluster.tail), len(chain))
    (runs,) = in_runs(chain, [1.0] * count, [1.0])
    found = dict(zip(seconds, runs, strict=True))
    ties = {name: profile.layer(name).measured(UseFacts).with_layer or name for name in pins}
    return {
        name: (way, f"{exchange}{':' if exchange else ''}{cluster.size + found[ties[name]]}")
        for name, (way, exchange) in pins.items()
    }


def _are_apart(exchanges: Iterable[str], cluster: Cluster) -> bool:
    """Return whether layers name ranks of hosts that bring no rows, all of them."""
    ranks = [rows_and_rest(exchange)[1] for exchange in exchanges]
    return all(rank.isdecimal() and int(rank) >= cluster.size for rank in ranks)


def check_cuts(profile: ModelProfile, holders: Mapping[str, int]) -> None:
    """Raise PlanError if layers have ranks such that a cut lies where none can.

    Layers that each rank has for its own rows come before all others.
    """
    stations = stations_at(profile.layers, dict.fromkeys(profile.names, EACH) | dict(holders))
    for number, station in enumerate(stations):
        if number and station.rank == EACH:
            raise PlanError(
                "layers of the ranks that train come after layers on hosts that bring no rows",
                where=f"layer {station.uses[0].layer}",
                do="give all layers from there on to these hosts, too, or those before to ranks "
                "that train",
            )
        if station.before_bytes >= NO_CUT:
            raise PlanError(
                "forward changes a value in place of which another rank has a view",
                where=f"before layer {station.uses[0].layer}",
                do="let forward compute a new value (x = x + 1 in place of x += 1), or give the "
                "layers before and after to one rank",
            )


def holders_of(
    profile: ModelProfile,
    cluster: Cluster,
    counts: Sequence[int] | None = None,
    passage: RowPassage = WHOLE,
    paces: Sequence[float] = (),
) -> dict[str, int]:
    """Return a rank for each layer. Layers that use one parameter have one rank.

    Layers are cut into runs in the order of their first use. Several cuts are tried: for each limit
    of a run's seconds the one that the fewest bytes cross. The likeliest are simulated, and the
    shortest step wins. Ranks that compute faster get more; if some get none, it is the slowest.

    Args:
        profile: the model.
        cluster: the ranks.
        counts: numbers of ranks that may have layers; None: all ranks have some.
        passage: the way of rows through the ranks.
        paces: the seconds of each rank, as a part of those of the slowest; (): as measured.
    """
    uses = uses_of(profile.layers)
    firsts = {use.layer: use for use in reversed(uses)}
    seconds = dict.fromkeys(firsts, 0.0)
    for use in uses:
        seconds[use.layer] += use.forward_s + use.backward_s
    order = [*dict.fromkeys(use.layer for use in uses)]
    chain = [(seconds[name], firsts[name].before_bytes) for name in order]
    most = min(cluster.size, len(order))
    known = paces or profile.layers[0].measured(UseFacts).paces
    paces = known if len(known) == cluster.size else (1.0,) * cluster.size
    quickest = sorted(range(cluster.size), key=lambda rank: paces[rank])
    tried = set[tuple[int, ...]]()
    for count in {min(count, most) for count in counts or [most]}:
        ranks = sorted(quickest[:count])
        for runs in in_runs(chain, [paces[rank] for rank in ranks], _SLACKS):
            tried.add(tuple(ranks[run] for run in runs))

    def stations(runs: Iterable[int]) -> list[StationUses]:
        return stations_of(uses, dict(zip(order, runs, strict=True)), paces)

    likely = sorted(sorted(tried), key=lambda runs: least_s(stations(runs), cluster, passage))
    best = min(likely[:_SIMULATED], key=lambda runs: sum(step_of(stations(runs), cluster, passage)))
    found = dict(zip(order, best, strict=True))
    ties = {layer.name: layer.measured(UseFacts).with_layer for layer in profile.layers}
    return {layer.name: found[ties[layer.name] or layer.name] for layer in profile.layers}


def in_runs(
    chain: Sequence[tuple[float, float]], paces: Sequence[float], slacks: Sequence[float]
) -> list[list[int]]:
    """Return the run of each layer of a chain, such that the fewest bytes cross.

    Args:
        chain: of each layer its seconds, and the bytes that cross before it.
        paces: the factor of each run for the seconds of its layers. Each run has a layer.
        slacks: limits of the longest run, as multiples of the least that it can take. There is an
            answer for each.

    Examples:
        >>> chain = [(1.0, 9.0), (1.0, 1.0), (1.0, 9.0), (3.0, 9.0)]
        >>> in_runs(chain, paces=[1.0, 1.0], slacks=[1.0, 2.0])
        [[0, 0, 0, 1], [0, 1, 1, 1]]
        >>> in_runs(chain, paces=[1.0, 0.2], slacks=[1.0])
        [[0, 1, 1, 1]]
    """
    seconds, sizes = np.array(chain).T
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    lengths = ends[None, :] - ends[:, None]  # seconds of the run between two places
    lengths = np.where(np.tri(len(ends), dtype=bool), np.inf, lengths)  # a run has a layer
    longest = {pace: lengths * pace for pace in set(paces)}
    shortest, _ = _least([longest[pace] for pace in paces], np.maximum)
    crossing = np.append(sizes, 0.0)[:, None]
    crossing[0] = 0.0
    found = []
    for slack in slacks:
        limit = shortest * slack * (1 + _ROUNDING)
        fits = {pace: np.where(each <= limit, crossing, np.inf) for pace, each in longest.items()}
        _, begins = _least([fits[pace] for pace in paces], np.add)
        places = pairwise([*begins, len(chain)])
        found.append([rank for rank, (begin, end) in enumerate(places) for _ in range(begin, end)])
    return found


def _least(
    costs: Sequence[npt.NDArray[np.float64]], joined: Callable[..., Any]
) -> tuple[float, list[int]]:
    """Return the least cost of runs from the first place to the last, and their begins.

    Args:
        costs: the cost of each run, by the places where it begins and ends.
        joined: joins two costs.
    """
    (first, *others), begins = costs, []
    best = first[0]
    for each in others:
        ways = joined(best[:, None], each)
        begins.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    at, found = len(best) - 1, list[int]()
    for ways in reversed(begins):
        at = int(ways[at])
        found.insert(0, at)
    return float(best[-1]), [0, *found]


def is_dealt(plan: Plan) -> bool:
    """Return whether a plan gives each layer to a rank."""
    ways = {choice.strategy for choice in plan.choices}
    return any(named(Strategy, way).role.names_ranks for way in ways)


def groups_in(plan: Plan) -> RankGroups | None:
    """Return the groups of ranks that hold the layers of a pipeline; None if there are none."""
    ways = {choice.strategy for choice in plan.choices}
    named_ranks = {way for way in ways if named(Strategy, way).role.names_ranks}
    held = [choice.group for choice in plan.choices if choice.strategy in named_ranks]
    return RankGroups.of(held, plan.ranks) if held else None


def holders_in(plan: Plan) -> dict[str, int]:
    """Return the rank of each layer of a pipeline in a plan, by name."""
    return {
        choice.layer: choice.holder
        for choice in plan.choices
        if named(Strategy, choice.strategy).role.names_ranks
    }


def home_of(name: str, holders: Mapping[str, int]) -> int:
    """Return the rank of a buffer that training changes: that of the layers around it.

    Args:
        name: the dotted name of the buffer.
        holders: the rank of each layer.

    Raises:
        PlanError: it is in the loss, or layers around it have several ranks.
    """
    if name.startswith(OF_LOSS):
        raise PlanError(
            "a pipeline does not keep buffers of the loss that training changes",
            where=f"buffer {name.removeprefix(OF_LOSS)} of the loss",
            do="make the buffer a part of the model, or leave out the pipeline",
        )
    module = name
    while True:
        module = module.rpartition(".")[0]
        near = {
            rank
            for layer, rank in holders.items()
            if not module or layer == module or layer.startswith(f"{module}.")
        }
        if len(near) == 1:
            return near.pop()
        if near:
            raise PlanError(
                "training changes a buffer of a module with layers on several ranks",
                where=f"buffer {name}",
                do="make it a buffer of a module with layers of one rank, or give these layers to "
                "one rank",
            )
