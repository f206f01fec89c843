"""Homes of tensors that no plan names: the one rank whose stations use them.

Frozen parameters, and buffers that training changes, belong to the station in which a function uses
them. The first call of the model shows it. Later calls put their cuts so that it stays so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from shoal.pipeline.record import ForwardRecord
from shoal.pipeline.stations import Stations
from shoal.pipeline.walk import Position


def homes_of(
    uses: Mapping[Position, Iterable[str]], found: Stations, homeless: Iterable[str]
) -> dict[str, int]:
    """Return the rank of each tensor that the stations of one rank alone use, by name.

    Args:
        uses: the names of tensors that the events of a forward use.
        found: the stations.
        homeless: the names of tensors without a home.
    """
    wanted = dict.fromkeys(homeless)
    ranks: dict[str, set[int]] = {}
    for position, names in uses.items():
        holder = found.holders[bisect_right(found.cuts, position)]
        for name in names:
            if name in wanted:
                ranks.setdefault(name, set()).add(holder)
    return {name: min(ranks[name]) for name in wanted if len(ranks.get(name, ())) == 1}


def uses_of(record: ForwardRecord) -> dict[Position, set[str]]:
    """Return the names of parameters and buffers that the events of a forward use."""
    uses = {position: set(names) for position, names in record.parameters.items()}
    for position, names in record.buffers.items():
        uses.setdefault(position, set()).update(names)
    return uses
