"""Plans that give each layer to a rank: the rank of each, the number of parts of rows, their codec.

Rows go in 1, 2, 4 or 8 parts, if the sample showed that parts of a rank's rows are computed alike.
More parts keep ranks less idle, but each is computed more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.codecs.coded_exchange import read_codec
from shoal.contracts.strategy import Strategy
from shoal.core.facts import Cluster, ModelProfile, Setting
from shoal.core.placement import BALANCED
from shoal.core.registry import named
from shoal.pipeline.prices import RowPassage, stations_at, step_of
from shoal.planner.holders import holders_of, unasked_holders
from shoal.planner.lossy_plans import WORTH
from shoal.planner.options import known, unserved_error
from shoal.planner.search_options import Constraints
from shoal.planner.timeline import Predictor
from shoal.strategies.pipeline import passage_of
from shoal.strategies.row_parts import RowFacts, whole_rows

Holders = Callable[[RowPassage], dict[str, int] | None]

_PARTS = (1, 2, 4, 8)  # parts of a rank's rows
_PARTS_WORTH = 0.05  # share of the step that more parts must save


@dataclass(frozen=True)
class Dealing:
    """Layers that are given to ranks.

    Args:
        pins: the pin of each layer.
        parts: parts of each rank's rows.
    """

    pins: dict[str, str]
    parts: int = 1


def way_of_dealing(constraints: Constraints) -> str | None:
    """Return the strategy that may give layers to ranks unasked, if one may."""
    if constraints.pins or constraints.placement != BALANCED:
        return None
    ways = known(constraints.strategies)
    return next((name for name in ways if named(Strategy, name).role.names_ranks), None)


def is_dealt_alone(constraints: Constraints) -> bool:
    """Return whether a pipeline is the only strategy allowed."""
    return all(named(Strategy, n).role.names_ranks for n in known(constraints.strategies))


def dealing_of(
    profile: ModelProfile,
    cluster: Cluster,
    constraints: Constraints,
    micro_batches: int | None,
    codecs: Sequence[str],
) -> Dealing | None:
    """Return the best way to give each layer to a rank; None if layers may not be given to ranks.

    Args:
        profile: the model.
        cluster: the ranks.
        constraints: the limits that the plan must keep.
        micro_batches: parts of each rank's rows; None leaves the number open.
        codecs: codecs that may be used, as plans write them.
    """
    way = way_of_dealing(constraints)
    if way is None:
        return None
    is_alone, predictor = is_dealt_alone(constraints), Predictor(profile, cluster)
    for layer in profile.layers if is_alone else ():
        if (reason := predictor.refusal(layer, way)) is not None:
            raise unserved_error(layer.name, {way: reason})

    def holders(passage: RowPassage) -> dict[str, int] | None:
        if is_alone:
            return holders_of(profile, cluster, passage=passage)
        return unasked_holders(predictor, way, passage)

    tried = [
        found
        for codec in ("", *_rows_codec(codecs))
        if (found := _in_parts(profile, cluster, micro_batches, holders, codec))
    ]
    if not tried:
        return None
    dealt, setting, _ = min(tried, key=lambda found: found[2] * (1 + WORTH * bool(found[1].codec)))
    before = f"+{setting.codec}" if setting.codec else ""
    pins = {name: f"{way}{before}:{rank}" for name, rank in dealt.items()}
    return Dealing(pins, setting.parts)


def _rows_codec(codecs: Sequence[str]) -> list[str]:
    """Return the codec for values that cross: the most exact one that may code them."""
    able = [codec for codec in map(read_codec, codecs) if codec.by_value]
    return [str(min(able, key=lambda codec: codec.most_error))] if able else []


def _in_parts(
    profile: ModelProfile,
    cluster: Cluster,
    micro_batches: int | None,
    holders: Holders,
    codec: str,
) -> tuple[dict[str, int], Setting, float] | None:
    """Return the ranks of layers, the setting of rows between them, and the seconds of the step."""
    facts = profile.layers[0].measured(RowFacts)
    numbers = [micro_batches] if micro_batches else _numbers(profile)
    dealt = holders(passage_of(Setting(parts=numbers[0], codec=codec), facts, cluster))
    if dealt is None:
        return None
    stations = stations_at(profile.layers, dealt)
    best: tuple[Setting, float] | None = None
    for parts in numbers:
        setting = Setting(parts=parts, codec=codec)
        seconds = sum(step_of(stations, cluster, passage_of(setting, facts, cluster)))
        if best is None or seconds < best[1] * (1 - _PARTS_WORTH):
            best = setting, seconds
    assert best is not None
    return dealt, *best


def _numbers(profile: ModelProfile) -> list[int]:
    """Return the numbers of parts that rows may go in."""
    facts = profile.layers[0].measured(RowFacts)
    return [1] if whole_rows(profile) else [n for n in _PARTS if n <= max(1, facts.rows)]
