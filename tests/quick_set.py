"""Of the product of several parameters, a few cases that show every value of each."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)


def showing_all(cases: Mapping[Case, Sequence[Hashable]]) -> Iterator[Case]:
    """Cases that show every value once, and on the way as many pairs of values as can be.

    `cases` maps each to its values, one a parameter.
    """
    left = dict(cases)
    values = {value for own in left.values() for value in own}
    pairs = {pair for own in left.values() for pair in combinations(own, 2)}
    while values:
        case = max(
            left,
            key=lambda each: (
                len(values.intersection(left[each])),
                len(pairs.intersection(combinations(left[each], 2))),
            ),
        )
        values.difference_update(left[case])
        pairs.difference_update(combinations(left.pop(case), 2))
        yield case
