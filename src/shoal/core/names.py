"""Dotted names and globs of pins and placements, and the names of the model that they mean."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from shoal.core.errors import PlanError

T = TypeVar("T")


def matched(pattern: str, names: Sequence[str], use: str, kind: str) -> list[str]:
    """Return the names that a pattern means: an equal name, or if there is none, all that its glob
    matches.

    Args:
        pattern: the name or glob.
        names: all names of the model.
        use: the pattern's use for messages, e.g. "pin".
        kind: the noun for a name in messages, e.g. "layer".

    Raises:
        PlanError: it matches none. The message lists similar names.
    """
    if pattern in names:  # also "block[0]", which as a glob would mean "block0"
        return [pattern]
    matches = [name for name in names if fnmatchcase(name, pattern)]
    if not matches:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
        raise PlanError(
            f"the {use} {pattern!r} matches no {kind} with trainable parameters",
            expected=f"a {kind} such as " + ", ".join(near),
            do=f"use a dotted name or a glob, such as {near[0]!r}",
        )
    return matches


def by_known_names(
    values: Mapping[str, T], names: Collection[str], others: Mapping[str, str]
) -> dict[str, T]:
    """Return values by patterns, with other names of layers replaced by the known ones.

    Args:
        values: values by name or glob; later ones win.
        names: names by which a plan knows layers and parameters.
        others: further names in the model, each with the known one.

    Examples:
        >>> by_known_names({"head": "tied", "b*": "sliced"}, ["table", "body"], {"head": "table"})
        {'table': 'tied', 'b*': 'sliced'}
    """
    known: dict[str, T] = {}
    for pattern, value in values.items():
        found = [pattern]
        if not any(_means(pattern, name) for name in names):
            found = list({owner: None for name, owner in others.items() if _means(pattern, name)})
        for name in found or [pattern]:
            known.pop(name, None)  # the later pattern wins, so it moves to the end
            known[name] = value
    return known


def _means(pattern: Any, name: str) -> bool:
    return isinstance(pattern, str) and (pattern == name or fnmatchcase(name, pattern))


def first_names(names: Sequence[Any], most: int = 4) -> str:
    """Write the first names of many, and the number of the others.

    Examples:
        >>> first_names(["a", "b", "c"]), first_names(["a", "b", "c"], most=2)
        ('a, b, c', 'a, b and 1 more')
    """
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def pins(layers: Iterable[str], way: str = "replicate") -> str:
    """Write the pins that serve layers in this way, for messages: `pins={"fc": "replicate"}`."""
    return "pins={" + ", ".join(f'"{name}": "{way}"' for name in layers) + "}"
