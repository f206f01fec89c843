"""Bytes of values that cross a place in a forward, for every place at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import final

from shoal.pipeline.walk import Position

Life = tuple[Position, Position, int]  # behind which a value is there, its last use, its bytes


@final
class LiveBytes:
    """Bytes of values that were made before a place and are used behind it.

    Args:
        lives: the life of each value.
    """

    def __init__(self, lives: Iterable[Life]) -> None:
        known = list(lives)
        self._made, self._begun = _sums((made, nbytes) for made, _, nbytes in known)
        self._last, self._ended = _sums((max(made, last), nbytes) for made, last, nbytes in known)

    def at(self, cut: Position) -> int:
        """Return the bytes that cross a cut."""
        return self._begun[bisect_left(self._made, cut)] - self._ended[bisect_left(self._last, cut)]


def _sums(sizes: Iterable[tuple[Position, int]]) -> tuple[list[Position], list[int]]:
    """Return places in order, and the bytes at places before each."""
    ordered = sorted(sizes)
    return [place for place, _ in ordered], [0, *accumulate(nbytes for _, nbytes in ordered)]
