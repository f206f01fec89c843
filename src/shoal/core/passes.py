"""Passes over the sharded loaders of a session, and which of them training belongs to.

    drawn      a rank takes a batch of a pass
    backward   what was drawn since the backward before has been trained on: those passes count
    stepped    an optimizer has stepped: a sign of training, too, if gradients were made by hand

A pass that no backward belongs to is a peek (a batch to measure with, pictures for a log). It does
not count, so a rank that peeks alone is no epoch ahead of the others. As long as no model is
parallelised, nobody sees backwards: a pass counts if it went to its end.
Guarded by tests/data/test_passes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final
from weakref import WeakSet

import torch

from shoal.core.nothing import nothing

_MOST_DRAWN = 64  # passes that are kept until a backward comes


class PassPosition(NamedTuple):
    """A position in a pass, the same on every rank.

    Args:
        taken: rows or batches that all ranks have taken.
        end: number of them in the whole stream, as soon as its end was read; else 0.
        digest: of a row that was read last; 0 if the order tells of all rows.
    """

    taken: int = 0
    end: int = 0
    digest: int = 0


_AT_START = PassPosition()


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
    position: PassPosition = _AT_START  # after the last batch that was drawn

    def is_like(self, other: Pass) -> bool:
        """Whether both are over the same loader in the same epoch."""
        return (self.loader, self.epoch) == (other.loader, other.epoch)

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
        self.may_repeat = False  # a sampler may give ranks the same rows on purpose
        self.said = set[str]()  # lines about loaders, each of which is said once
        self.waits = WeakSet[Waiting]()  # of the models that there are still
        self.at_end: Callable[[], None] = nothing  # of an epoch: called on that thread
        self.hear: Callable[[], None] = nothing  # raises once if a rank is known to be gone
        self._trainer = 0  # the thread that calls models
        self._drawn: list[Pass] = []  # since the last backward
        self._task = -1  # autograd's number of that backward
        self._is_seen = False  # a backward since the last step
        self._current: Pass | None = None  # that the last backward belongs to
        self._beside: list[Pass] = []  # passes that began with it: all but one may be looks

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

    def stepped(self) -> None:
        """An optimizer has stepped. Without a backward before it, its gradients were made by hand.

        Not where nothing was drawn: one backward may be for several optimizers.
        """
        if self._drawn and not self._is_seen:
            self.backward()
        self._is_seen = False

    def backward(self) -> None:
        """Note a backward of a parallelised model. Of several models, or outputs, it is one."""
        task = torch._C._current_graph_task_id()
        if task == self._task != -1:
            return
        self._task, self._is_seen = task, True
        if not self._drawn:
            if self._current is not None:
                self._current.backwards += 1
            return
        # one that only met its end since then is no reason to take the next one for a peek
        known = [one for one in self._drawn if one.trained and not one.is_over]
        loaders = {one.loader for one in known}
        if not known:
            self._begin(self._drawn)
        elif self._current not in known:  # else it goes on, whatever was drawn beside it
            self._begin(known)
        elif self._beside:
            self._forget_looks(known)
        assert self._current is not None
        self._current.backwards += 1
        for one in self._drawn:
            if one.loader not in loaders:  # else it is a peek beside the pass that trains
                one.trained = True
        self._drawn.clear()

    def _begin(self, passes: Sequence[Pass]) -> None:
        """Choose the pass that training belongs to: of passes alike the one least drawn from.

        The others are looks, as it turns out when it goes on and they do not.
        """
        before, unsure = self._current, self._beside
        self._forget_looks(passes)
        alike = [one for one in passes if one.is_like(passes[-1])]
        self._current = min(reversed(alike), key=lambda one: one.batches)
        if before in unsure and self._current in unsure:
            self._current.backwards += before.backwards  # they belong to this pass
        self._beside = list(passes)

    def _forget_looks(self, going_on: Sequence[Pass]) -> None:
        """Count no pass that may have been a look, if another one like it goes on."""
        unsure, self._beside = self._beside, []
        for one in unsure:
            if any(one.is_like(other) for other in going_on if other in unsure):
                one.trained = one in going_on

    def waited_s(self) -> float:
        """Seconds that the main thread has waited for other ranks."""
        return sum(each.waited_s() for each in self.waits)

    def counts(self, one: Pass) -> bool:
        """Whether it is an epoch, and no peek."""
        return one.trained or (one.complete and not self.is_trained())

    def is_latest(self, one: Pass) -> bool:
        """Whether the last backward belongs to it."""
        return one is self._current

    def current(self) -> Pass | None:
        """The pass that the last backward belongs to.

        None where a thread of its own draws batches, which may be ahead by any number of them.
        """
        current = self._current
        return current if current is not None and current.thread == self._trainer else None

    def positions(self) -> list[PassPosition]:
        """Return the position of the pass that the last backward belongs to.

        Several if passes over the same loader began before that backward: one of them trains, and
        the others may be looks of this rank alone.
        """
        current = self.current()
        if current is None:
            return []
        return [one.position for one in self._beside or [current] if one.is_like(current)]
