"""Passes over the sharded loaders of a session, and which of them training belongs to.

    drawn      a rank takes a batch of a pass
    backward   what was drawn since the backward before has been trained on: those passes count

A pass that no backward belongs to is a peek (a batch to measure with, pictures for a log). It does
not count, so a rank that peeks alone is no epoch ahead of the others. As long as no model is
parallelised, nobody sees backwards: a pass counts if it went to its end.
Guarded by tests/data/test_passes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final
from weakref import WeakSet

from shoal.core.nothing import nothing

_MOST_DRAWN = 64  # passes that are kept until a backward comes


@final
@dataclass(eq=False)
class Pass:
    """One pass over one loader."""

    loader: int  # its number, by calls of `shard`
    epoch: int
    order: int  # a digest of the rows in their order
    trained: bool = False  # a backward belongs to it
    complete: bool = False  # it went to its end
    thread: int = 0  # that has drawn its last batch
    batches: int = 0  # that were drawn
    backwards: int = 0  # that belong to it

    @property
    def is_over(self) -> bool:
        """Whether all of it has been trained on."""
        return self.complete and self.backwards >= self.batches


class Waiting(Protocol):
    """What a model waits for other ranks by."""

    def waited_s(self) -> float:
        """Seconds that the main thread has waited there."""


def _never() -> bool:
    return False


@final
class Passes:
    """Those of one session.

    Args:
        is_trained: whether any model is parallelised now.
    """

    def __init__(self, is_trained: Callable[[], bool] = _never) -> None:
        self.is_trained = is_trained
        self.loaders = 0  # that were sharded
        self.waits = WeakSet[Waiting]()  # of the models that there are still
        self.at_end: Callable[[], None] = nothing  # of an epoch: called on that thread
        self.hear: Callable[[], None] = nothing  # raises once if a rank is known to be gone
        self._trainer = 0  # the thread that calls models
        self._drawn: list[Pass] = []  # since the last backward
        self._current: Pass | None = None  # that the last backward belongs to

    def drawn(self, one: Pass) -> None:
        """A batch of it is taken, or its end is met.

        Raises:
            WorldError: another rank is gone, and this rank's program has not been told.
        """
        self.hear()
        one.thread = threading.get_ident()
        if not self._drawn or self._drawn[-1] is not one:
            self._drawn.append(one)
            del self._drawn[:-_MOST_DRAWN]

    def ended(self, one: Pass) -> None:
        """Its end is met. If training drew from it, and no thread draws ahead, an epoch is over.

        That is the pass that the last backward belongs to: where two are drawn for each backward,
        the one that is drawn last. Another may be read by one rank alone.
        """
        one.complete = True
        if one is self._current and one.thread == self._trainer:
            self.at_end()

    def forward(self) -> None:
        """A parallelised model is called."""
        self._trainer = threading.get_ident()

    def backward(self) -> None:
        """A backward comes to a parallelised model."""
        if not self._drawn:
            if self._current is not None:
                self._current.backwards += 1
            return
        # one that only met its end since then is no reason to take the next one for a peek
        known = [one for one in self._drawn if one.trained and not one.is_over]
        loaders = {one.loader for one in known}
        if self._current not in known:  # else it goes on, whatever was drawn beside it
            self._current = (known or self._drawn)[-1]
        self._current.backwards += 1
        for one in self._drawn:
            if one.loader not in loaders:  # else it is a peek beside the pass that trains
                one.trained = True
        self._drawn.clear()

    def waited_s(self) -> float:
        """Seconds that the main thread has waited for other ranks."""
        return sum(each.waited_s() for each in self.waits)

    def counts(self, one: Pass) -> bool:
        """Whether it is an epoch, and no peek."""
        return one.trained or (one.complete and not self.is_trained())

    def current(self) -> Pass | None:
        """The pass that the last backward belongs to.

        None where a thread of its own draws batches, which may be ahead by any number of them.
        """
        current = self._current
        return current if current is not None and current.thread == self._trainer else None
