"""Figures that a rank may have measured at an earlier start of the same job.

Prices are kept, but no permissions: each start looks again at how a model treats a sample. A
measurement asks for its figure by name, and measures only if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, final

import msgspec

T = TypeVar("T")


@final
class KnownFigures:
    """The figures of one rank.

    Args:
        before: figures of an earlier start, by name, as plain data.

    Examples:
        >>> known = KnownFigures({"seconds": 0.5})
        >>> known.figure("seconds", float, lambda: 0.7), known.figure("bytes", int, lambda: 8)
        (0.5, 8)
        >>> known.figures
        {'seconds': 0.5, 'bytes': 8}
    """

    def __init__(self, before: Mapping[str, Any] | None = None) -> None:
        self._before = before or {}
        self.figures: dict[str, Any] = {}  # all figures that were asked for
        self.has_measured = False  # whether any figure was measured

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a figure of an earlier start; None if there is none of this type."""
        try:
            found = msgspec.convert(self._before[name], kind)
        except (KeyError, msgspec.ValidationError):
            return None
        self.figures[name] = self._before[name]
        return found

    def forget(self) -> None:
        """Forget all figures, so that they are measured again, because one has changed."""
        self._before, self.figures = {}, {}

    def put(self, name: str, figure: T) -> T:
        """Keep a figure for the next start, and return it."""
        self.has_measured = True
        self.figures[name] = msgspec.to_builtins(figure)
        return figure

    def figure(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return a figure, which is measured if it is not known."""
        found = self.get(name, kind)
        return self.put(name, measure()) if found is None else found
