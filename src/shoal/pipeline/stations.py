"""Stations: runs of a model's events, each computed by the rank that holds its layers.

A cut lies between the last event that uses a parameter of one rank and the first that uses one of
another, where the fewest bytes cross; among equals it is the last place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.errors import PlanError
from shoal.pipeline.record import ForwardRecord
from shoal.pipeline.walk import HOOKS, STEP, Position

_MOST_PLACES = 64  # places that are looked at for a cut


@dataclass(frozen=True)
class Stations:
    """The stations of a forward, in its order.

    Args:
        holders: the rank of each station.
        cuts: the position before which each station begins, but for the first.
    """

    holders: tuple[int, ...]
    cuts: tuple[Position, ...]


def stations(
    record: ForwardRecord, holders: Mapping[str, int], parameters: Mapping[str, str]
) -> Stations:
    """Return the stations of a forward.

    Args:
        record: the forward.
        holders: the rank of each layer.
        parameters: the layer of each trainable parameter.
    """
    events = _holding(record, holders, parameters)
    if not events:
        return Stations((0,), ())
    order = sorted({*record.calls, *record.functions})
    ranks, cuts = [events[0][1]], []
    for (before, left), (after, right) in pairwise(events):
        if left != right:
            ranks.append(right)
            cuts.append(cut_between(record, order, before, after))
    return Stations(tuple(ranks), tuple(cuts))


def _holding(
    record: ForwardRecord, holders: Mapping[str, int], parameters: Mapping[str, str]
) -> list[tuple[Position, int]]:
    """Return the events that use parameters, in order, each with the rank that holds these."""
    found: list[tuple[Position, int]] = []
    for position, names in record.state_uses().items():
        ranks = {holders[parameters[name]] for name in names if name in parameters}
        if len(ranks) > 1:
            raise PlanError(
                "a function uses parameters that the plan gives to several ranks",
                where=f"the forward of {record.calls.get(position[:-1]) or 'the model itself'}",
                got=", ".join(
                    f"{name} on rank {holders[parameters[name]]}"
                    for name in sorted(names)
                    if name in parameters
                ),
                do="give these layers to one rank",
            )
        found += [(position, rank) for rank in ranks]
    return found


def cut_between(
    record: ForwardRecord, order: Sequence[Position], before: Position, after: Position
) -> Position:
    """Return the place between two events where the fewest bytes cross.

    Args:
        record: the forward.
        order: the places of all its events, in order.
        before: the place behind which the cut lies.
        after: the place before which it lies, or this place.

    Raises:
        PlanError: forward changes a value in place, of which both sides have a view.
    """
    between = order[bisect_right(order, before) : bisect_right(order, after)]
    outer = [place if outermost(place) <= before else outermost(place) for place in between]
    places = [*dict.fromkeys(outer)][-_MOST_PLACES:]
    apart = [place for place in places if not record.parts_views(place)]
    if not apart:
        first, _ = record.parts_views(places[-1])
        raise PlanError(
            "forward changes a value in place of which another rank has a view",
            where=f"a value of {record.calls.get(first[0]) or record.functions.get(first[0])}",
            do="let forward compute a new value (x = x + 1 in place of x += 1), or give the layers "
            "before and after to one rank",
        )
    return min(reversed(apart), key=record.live_bytes.at)


def outermost(place: Position) -> Position:
    """Return the same place in the outermost frame: a frame's first layer begins the frame."""
    if HOOKS in place:
        place = place[: place.index(HOOKS)]
    while len(place) > 1 and place[-1] in (1, STEP):
        place = place[:-1]
    return place
