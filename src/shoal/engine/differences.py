"""Differences between ranks that matter, found in the reports of all (engine/common_state.py).

The first one that matters is named, with the rank that differs from most, both values, and the
remedy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.passes import PassPosition

_NEARLY = 1e-5  # part of the largest element: processors may round differently
OF_RATE = "['lr']"  # end of a learning rate's name
OF_SCALER = "the GradScaler of"
_SAME_SCALE = (
    "make the scaler alike on every rank, and load its state on every rank or on none, as by "
    "shoal.load(folder, …, scaler=scaler)"
)
_SAME_CHANGES = (
    "let every rank make the same changes: give schedulers that look at a loss "
    "shoal.mean(loss, weight=rows), and load a checkpoint on every rank"
)
_OWN_STREAMS = "Where each rank has a stream of its own: shard(loader, shards_itself=True)"
_SAME_ROWS = (
    "give a sampler with a random source of its own the same seed on every rank. " + _OWN_STREAMS
)
_SAME_STREAM = (
    "let the stream give the same rows in the same order on every rank: the same files, and one "
    "seed for a random source of its own. " + _OWN_STREAMS
)
_LOAD = "load weights, and change them, on every rank alike"


@dataclass(frozen=True)
class Difference:
    """Difference between two ranks, in the words of a message."""

    rank: int
    other: int
    what: str
    got: str
    expected: str
    do: str


def first_difference(told: Sequence[Mapping[str, Any]], alike: bool) -> Difference | None:
    """Return the first difference that matters.

    `alike` says that all processors round in the same way.
    """
    return _of_settings(told) or _of_passes(told) or _of_owners(told) or _of_weights(told, alike)


def _of_settings(told: Sequence[Mapping[str, Any]]) -> Difference | None:
    listed = [dict(map(tuple, report["settings"])) for report in told]
    for name in dict.fromkeys(name for report in listed for name in report):
        values = [report.get(name, "(not there)") for report in listed]
        if (pair := _odd(values)) is not None:
            rank, other = pair
            return Difference(
                rank,
                other,
                name,
                values[rank],
                values[other],
                _SAME_SCALE if name.startswith(OF_SCALER) else _SAME_CHANGES,
            )
    return None


def with_schedulers(odd: Difference, ranks: Sequence[Mapping[str, str]]) -> Difference:
    """Add the number of a scheduler that has made two learning rates differ."""
    own, other = ranks[odd.rank], ranks[odd.other]
    name = next((name for name in own if name in other and own[name] != other[name]), None)
    if name is None:
        return odd
    return replace(
        odd,
        got=f"{odd.got}, {name} is {own[name]}",
        expected=f"{odd.expected}, {name} is {other[name]}",
    )


def _of_passes(told: Sequence[Mapping[str, Any]]) -> Difference | None:
    passes = [tuple(report["pass"]) for report in told]
    loaders = Counter(loader for loader, _, _ in passes)
    loader = loaders.most_common(1)[0][0]
    there = [rank for rank, report in enumerate(passes) if report[0] == loader != 0]
    for index, what in ((1, "the epoch of the sharded loader"), (2, "the order of its rows")):
        pair = _odd([passes[rank][index] for rank in there])
        if pair is not None:
            rank, other = there[pair[0]], there[pair[1]]
            got, expected = passes[rank][index], passes[other][index]
            return Difference(
                rank,
                other,
                f"{what} that it trains on (number {loader}, by calls of shoal.shard)",
                str(got) if index == 1 else f"epoch {passes[rank][1]}, digest {got:08x}",
                str(expected) if index == 1 else f"epoch {passes[other][1]}, digest {expected:08x}",
                "make the same passes on every rank, or call loader.set_epoch(epoch)"
                if index == 1
                else _SAME_ROWS,
            )
    return _of_places([(rank, told[rank]["places"]) for rank in there], loader)


def _of_places(ranks: Sequence[tuple[int, Sequence[Any]]], loader: int) -> Difference | None:
    """Compare the positions of ranks in a pass.

    A rank that looks at batches alone may report several positions.
    """
    places = [{PassPosition(*place) for place in of_rank} for _, of_rank in ranks]
    if not places or set.intersection(*places) or not all(places):
        return None
    counts = Counter(place for of_rank in places for place in of_rank)
    usual = [max(of_rank, key=lambda place: (counts[place], place)) for of_rank in places]
    pair = _odd(usual)
    if pair is None:
        return None
    at, expected = usual[pair[0]], usual[pair[1]]
    what, do = f"a row of the stream that each rank reads (loader number {loader})", _SAME_STREAM
    got, said = (f"digest {p.digest:08x}, of the step up to {p.taken}" for p in (at, expected))
    if at.end != expected.end:
        what = f"the length of the stream that each rank reads (loader number {loader})"
        got, said = map(_length, (at, expected))
    elif at.taken != expected.taken:
        what = f"the position in the sharded loader that it trains on (number {loader})"
        got, said = (f"{p.taken} rows or batches, taken by all ranks" for p in (at, expected))
        do = (
            "take as many batches on every rank from the iterator that trains, and load the "
            "loader's state on every rank. For a look: next(iter(loader))"
        )
    return Difference(ranks[pair[0]][0], ranks[pair[1]][0], what, got, said, do)


def _length(place: PassPosition) -> str:
    """Describe the length of a stream, as far as a rank has read it."""
    if place.end:
        return f"its stream ends after {place.end} rows or batches"
    return f"its stream goes on after {place.taken} rows or batches"


def _of_owners(told: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Compare weights with owners.

    An owner sends its own values, so one rank's change would be mixed in.
    """
    names = [report["of owners"] for report in told]
    if _odd(names) is None:
        return None
    rank = max(range(len(names)), key=lambda index: len(names[index]))
    other = min(range(len(names)), key=lambda index: len(names[index]))
    return Difference(
        rank,
        other,
        f"parameter {next(name for name in names[rank] if name not in names[other])}",
        f"changed by hand, with {len(names[rank]) - 1} others",
        "left as its owner had sent it",
        _LOAD + ". To change them on one rank alone, and put them back, let none have owners: "
        'strategies=["replicate", "factor"]',
    )


def _of_weights(told: Sequence[Mapping[str, Any]], alike: bool) -> Difference | None:
    changes = [report["changes"] for report in told]
    if _odd(changes) is None:
        return None
    for name in told[0]["weights"]:
        values = [report["weights"].get(name, (0, [])) for report in told]
        pair = _odd([digest for digest, _ in values])
        if pair is None:
            continue
        some = [numbers for _, numbers in values]
        if alike or _unlike(some[pair[0]], some[pair[1]]):
            # a rank that has changed them more often has probably done it
            rank, other = sorted(pair, key=lambda index: -abs(changes[index]))
            return Difference(
                rank,
                other,
                f"parameter {name}",
                f"changed {changes[rank]} times, by steps or by hand",
                f"{changes[other]} times",
                _LOAD + ". Make as many backwards and steps on each",
            )
    return None


def _unlike(one: Sequence[float], other: Sequence[float]) -> bool:
    largest = max((*one, *other), default=0.0)
    return any(abs(a - b) > _NEARLY * largest for a, b in zip(one, other, strict=True))


def _odd(values: Sequence[Any]) -> tuple[int, int] | None:
    """Return a rank with an unusual value, and one with the usual; None if all are equal."""
    numbers = Counter(map(repr, values))
    if len(numbers) < 2:
        return None
    most = max(numbers.values())
    usual = next(repr(value) for value in values if numbers[repr(value)] == most)
    odd = next(rank for rank, value in enumerate(values) if repr(value) != usual)
    return odd, next(rank for rank, value in enumerate(values) if repr(value) == usual)
