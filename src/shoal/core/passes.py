"""Passes over the sharded loaders of a session, and the one that training belongs to.

    drawn      a rank takes a batch of a pass
    backward   training has used the batches drawn since the last backward: their passes count
    stepped    an optimizer has stepped: a sign of training, too, if gradients were made by hand

A pass without a backward is a peek (a batch to measure with, pictures for a log). It does not
count, so a rank that peeks alone is not an epoch ahead of the others. As long as no model is
parallelised, backwards are not seen: then a pass counts if it went to its end. Guarded by
tests/data/test_passes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

import torch

from shoal.core.no_operation import nothing

_MOST_DRAWN = 64  # passes that are kept until a backward comes


class PassPosition(NamedTuple):
    """Position in a pass, the same on every rank.

    Args:
        taken: rows or batches that all ranks have taken.
        end: number of them in the whole stream; 0 until its end is read.
        digest: digest of the row that was read last; 0 if the order covers all rows.
    """

    taken: int = 0
    end: int = 0
    digest: int = 0


_AT_START = PassPosition()


@final
@dataclass(eq=False)
class Pass:
    """Pass over one loader."""

    loader: int  # the loader's number, by calls of `shard`
    epoch: int
    order: int  # a digest of the rows in their order
    trained: bool = False  # a backward belongs to it
    complete: bool = False  # it went to its end
    thread: int = 0  # thread that has drawn its last batch
    batches: int = 0  # batches that were drawn
    backwards: int = 0  # backwards that belong to it
    position: PassPosition = _AT_START  # after the last batch that was drawn

    def is_like(self, other: Pass) -> bool:
        """Return whether both are over the same loader in the same epoch."""
        return (self.loader, self.epoch) == (other.loader, other.epoch)

    @property
    def is_over(self) -> bool:
        """Whether all of it has been trained on."""
        return self.complete and self.backwards >= self.batches


class Waiting(Protocol):
    """Object by which a model waits for other ranks."""

    def waited_s(self) -> float:
        """Return the seconds that the main thread has waited there."""


def _never() -> bool:
    return False


@final
class Passes:
    """Passes of one session.

    Args:
        is_trained: whether any model is parallelised now.
    """

    def __init__(self, is_trained: Callable[[], bool] = _never) -> None:
        self.is_trained = is_trained
        self.loaders = 0  # number of loaders that were sharded
        self.may_repeat = False  # a sampler may give ranks the same rows on purpose
        self.said = set[str]()  # lines about loaders, to say each only once
        self.waits = WeakSet[Waiting]()  # wait objects of the models that still exist
        # called at the end of an epoch, on the drawing thread
        self.at_end: Callable[[], None] = nothing
        self.hear: Callable[[], None] = nothing  # raises once if a rank is known to be gone
        self._trainer = 0  # the thread that calls models
        self._drawn: list[Pass] = []  # passes drawn from since the last backward
        self._task = -1  # autograd's number of that backward
        self._is_seen = False  # whether a backward has come since the last step
        self._current: Pass | None = None  # the pass that the last backward belongs to
        self._beside: list[Pass] = []  # passes that began with it: all but one may be peeks

    def drawn(self, one: Pass) -> None:
        """Note that a batch of a pass is taken, or that its end is reached.

        Raises:
            WorldError: another rank is gone, and this rank's program does not know yet.
        """
        self.hear()
        one.thread = threading.get_ident()
        if not self._drawn or self._drawn[-1] is not one:
            self._drawn.append(one)
            del self._drawn[:-_MOST_DRAWN]

    def ended(self, one: Pass) -> None:
        """Note the end of a pass. If training drew from it, and no thread draws ahead, an epoch is
        over.

        That is the pass that the last backward belongs to. If two passes are drawn for each
        backward, it is the one that is drawn last. Another pass may be read by one rank alone.
        """
        one.complete = True
        if one is self._current and one.thread == self._trainer:
            self.at_end()

    def forward(self) -> None:
        """Note that a parallelised model is called."""
        self._trainer = threading.get_ident()

    def note_step(self) -> None:
        """Note a step of an optimizer. Without a backward before it, its gradients were made by
        hand.

        If nothing was drawn, the step does not count: one backward may serve several optimizers.
        """
        if self._drawn and not self._is_seen:
            self.backward()
        self._is_seen = False

    def backward(self) -> None:
        """Note a backward of a parallelised model.

        If it goes through several models or outputs, it counts once.
        """
        task = torch._C._current_graph_task_id()
        if task == self._task != -1:
            return
        self._task, self._is_seen = task, True
        if not self._drawn:
            if self._current is not None:
                self._current.backwards += 1
            return
        # a pass that only met its end since then does not make the next one a peek
        known = [one for one in self._drawn if one.trained and not one.is_over]
        loaders = {one.loader for one in known}
        if not known:
            self._begin(self._drawn)
        # otherwise the current pass goes on, whatever other passes were drawn
        elif self._current not in known:
            self._begin(known)
        elif self._beside:
            self._forget_looks(known)
        assert self._current is not None
        self._current.backwards += 1
        for one in self._drawn:
            if one.loader not in loaders:  # otherwise it is a peek during the pass that trains
                one.trained = True
        self._drawn.clear()

    def _begin(self, passes: Sequence[Pass]) -> None:
        """Choose the pass that training belongs to: among equal passes the one with the fewest
        batches.

        The others are peeks. This shows later, when it goes on and they do not.
        """
        before, unsure = self._current, self._beside
        self._forget_looks(passes)
        alike = [one for one in passes if one.is_like(passes[-1])]
        self._current = min(reversed(alike), key=lambda one: one.batches)
        if before in unsure and self._current in unsure:
            self._current.backwards += before.backwards  # they belong to this pass
        self._beside = list(passes)

    def _forget_looks(self, going_on: Sequence[Pass]) -> None:
        """Do not count a pass that may have been a peek, if another one like it goes on."""
        unsure, self._beside = self._beside, []
        for one in unsure:
            if any(one.is_like(other) for other in going_on if other in unsure):
                one.trained = one in going_on

    def waited_s(self) -> float:
        """Return the seconds that the main thread has waited for other ranks."""
        return sum(each.waited_s() for each in self.waits)

    def counts(self, one: Pass) -> bool:
        """Return whether a pass is an epoch, and not a peek."""
        return one.trained or (one.complete and not self.is_trained())

    def is_latest(self, one: Pass) -> bool:
        """Return whether the last backward belongs to a pass."""
        return one is self._current

    def current(self) -> Pass | None:
        """Return the pass that the last backward belongs to.

        The result is None if another thread draws batches, because it may be ahead by any number of
        them.
        """
        current = self._current
        return current if current is not None and current.thread == self._trainer else None

    def positions(self) -> list[PassPosition]:
        """Return the position of the pass that the last backward belongs to.

        There are several if passes over the same loader began before that backward. One of them
        trains, and the others may be peeks of this rank alone.
        """
        current = self.current()
        if current is None:
            return []
        return [one.position for one in self._beside or [current] if one.is_like(current)]
