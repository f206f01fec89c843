"""Sources of batches: passes over a source, and the position in the global order.

A position counts the rows that all ranks have taken, so any number of ranks can continue from it.
Batches that workers have fetched ahead are not taken yet. core/passes.py defines an epoch.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, final

from shoal.core.errors import UsageError
from shoal.core.passes import Pass, Passes, PassPosition
from shoal.core.random_state import undrawn
from shoal.data.deal import Deal
from shoal.data.shares import Shares

T = TypeVar("T")
Position = list[int]  # rows or batches that all ranks have taken; in each part of a stream
Fetch = Callable[[], Iterator[Any]]  # begins a pass over rows that the source has prepared
_MOST_EPOCH = 1 << 31
_MOST_BEGUN = 64  # most passes of one epoch that are kept, nearly all of them peeks


@dataclass(frozen=True)
class LoaderStep(Generic[T]):
    """The batch that this rank takes in one step, and the position after it."""

    batch: T
    position: Position  # position after this step
    last: bool = False  # whether it is the epoch's last step
    order: int = 0  # a digest of the pass's order, if it was not known before
    end: int = 0  # rows or batches of the whole stream, if its end was read
    digest: int = 0  # digest of one row of a stream in this step
    places: list[Any] = field(default_factory=list)  # places of a stream's parts


@dataclass(frozen=True)
class OwnPlace:
    """The rank that a position belongs to, if each rank has rows of its own."""

    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(eq=False)
class Begun:
    """A pass, and its position."""

    noted: Pass
    position: Position
    drawn: bool = False
    steps: int = 0  # number of steps with a backward
    places: list[Any] = field(default_factory=list)  # places of a stream's parts


class Source(ABC, Generic[T]):
    """Gives one rank its batches, pass after pass."""

    kind: ClassVar[str]  # name of the kind in positions and messages

    def __init__(self, deal: Deal, seed: int, passes: Passes, own: OwnPlace | None = None) -> None:
        self.deal, self.seed, self.own = deal, seed, own
        self.epoch = 0  # epoch of the next passes, until one of them counts
        self.start: Position = []  # position at which they begin: [] is the start of the epoch
        self._passes, self._begun = passes, list[Begun]()  # passes in this epoch
        self._left: Begun | None = None  # last epoch's pass, which may go on after a peek
        passes.loaders += 1
        self._number = passes.loaders

    @abstractmethod
    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """Begin a pass over the rest of the epoch; workers start at once."""

    @abstractmethod
    def num_steps(self) -> int:
        """Count the steps of the coming pass. Raises TypeError if the number is not known."""

    @abstractmethod
    def facts(self) -> str:
        """Describe the facts that every rank must have alike, in words."""

    def order(self) -> int:
        """Return a digest of the coming pass's order; 0 if it is not known yet."""
        return 0

    def passed(self, fetch: Fetch) -> Iterator[T]:
        """Begin a pass."""
        self._advance()
        if self.start:
            fetch = partial(_undrawn, fetch)
        begun = Begun(Pass(self._number, self.epoch, self.order()), self.start)
        self._begun = [*self._begun[-_MOST_BEGUN:], begun]
        steps = self.steps(fetch)
        return _TrackedPass(steps, begun, self._passes, self.deal.shares, self.own is not None)

    def follow_epoch(self, epoch: int) -> None:
        """Make this epoch the next pass's, as a sampler's `set_epoch` asks.

        A loop calls it before each pass, even before one that goes on in the middle of an epoch.
        """
        if _epoch(epoch) != self.epoch or any(map(self._counts, self._begun)):
            self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass begin this epoch, from its start.

        Raises:
            UsageError: it is no whole number from 0 on.
        """
        self.epoch, self.start, self._begun, self._left = _epoch(epoch), [], [], None

    def state(self) -> dict[str, Any]:
        """Return the position of the pass that training is in, as plain data."""
        epoch, position = self.epoch, self.start
        order = self.order() if position else 0
        current = self._current()
        if current is not None:
            epoch, position = current.noted.epoch, current.position
            order = current.noted.order
            if current.noted.complete:
                epoch, position, order = epoch + 1, [], 0
        own = {} if self.own is None or not position else asdict(self.own)
        return {
            "kind": self.kind,
            "seed": self.seed,
            "epoch": epoch,
            "position": list(position),
            "order": order,
            **own,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Make the next pass go on from a position.

        Raises:
            UsageError: it is no position, or belongs to another kind of loader, dataset or order.
        """
        try:
            kind, seed, epoch = str(state["kind"]), int(state["seed"]), int(state["epoch"])
            position, order = [int(n) for n in state["position"]], int(state["order"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "this is no position of a loader",
                got=f"{type(state).__name__}: {str(state)[:80]}",
                expected="what loader.state_dict() gave",
                do="load what was saved of this loader",
            ) from error
        if kind != self.kind:
            raise UsageError(
                "a position of another kind of loader",
                got=kind,
                expected=self.kind,
                do="load what was saved of this loader",
            )
        self._check_rank(state, position)
        before = self.seed, self.epoch, self.start, self._begun, self._left
        self.seed, self.epoch, self.start, self._begun, self._left = seed, epoch, position, [], None
        try:
            self.check(order)
        except UsageError:
            self.seed, self.epoch, self.start, self._begun, self._left = before
            raise

    def _check_rank(self, state: Mapping[str, Any], position: Position) -> None:
        place = OwnPlace(state.get("rank"), state.get("size"))  # type: ignore[arg-type]  # compared
        if self.own is not None and position and place != self.own:
            raise UsageError(
                "ranks that have rows of their own go on where they were on as many ranks only, "
                "each from its own state",
                got=f"the state of {place}",
                expected=f"that of {self.own}",
                do="start as many ranks, and save and load the state of each, or begin an epoch: "
                "loader.set_epoch(epoch)",
            )

    @abstractmethod
    def check(self, order: int) -> None:
        """Check that a pass can go on from the position that was set; `order` is its digest.

        Raises:
            UsageError: it cannot.
        """

    def _advance(self) -> None:
        if any(map(self._counts, self._begun)):
            self._left = self._current()
            self.epoch, self.start, self._begun = self.epoch + 1, [], []

    def _counts(self, begun: Begun) -> bool:
        """Return whether a pass counts as an epoch. One that went on at the very end does too."""
        nothing_left = begun.noted.complete and bool(begun.position) and not begun.drawn
        return self._passes.counts(begun.noted) or nothing_left

    def _current(self) -> Begun | None:
        """Return the pass that training is in, or without any model the last one."""
        trained = [begun for begun in self._begun if begun.noted.trained]
        if not trained and not self._passes.is_trained():
            trained = [begun for begun in self._begun if begun.drawn]
        latest = [begun for begun in trained if self._passes.is_latest(begun.noted)]
        return (latest or trained)[-1] if trained else self._left


def _undrawn(fetch: Fetch) -> Iterator[Any]:
    """Begin a pass that goes on, and restore torch's random state.

    The DataLoader drew a number as the epoch began, and now draws one again. Without this, dropout
    would get other numbers in a continued run than in one that was never stopped.
    """
    with undrawn():
        return fetch()


@final
class _TrackedPass(Iterator[T]):
    """An iterator over a pass, which notes the batches that are taken from it."""

    def __init__(
        self,
        steps: Iterator[LoaderStep[T]],
        begun: Begun,
        passes: Passes,
        shares: Shares,
        is_own: bool,
    ) -> None:
        self._steps, self._begun, self._passes, self._shares = steps, begun, passes, shares
        self._is_own = is_own  # this rank has its own rows, so ranks share only the number of steps

    @property
    def is_last(self) -> bool:
        """Whether the last batch that was drawn is known to be the epoch's last one."""
        return self._begun.noted.complete

    def __next__(self) -> T:
        if self._passes.current() is self._begun.noted:
            self._begun.steps += 1
            self._shares.asked(self._begun.steps)
        else:
            self._shares.asked(0)
        self._passes.drawn(self._begun.noted)
        try:
            step = next(self._steps)
        except StopIteration:
            self._passes.ended(self._begun.noted)
            raise
        self._begun.noted.batches += 1
        taken = self._begun.noted.batches if self._is_own else sum(step.position)
        self._begun.noted.position = PassPosition(taken, step.end, step.digest)
        self._begun.position, self._begun.places = step.position, step.places
        self._begun.drawn = True
        self._begun.noted.complete = step.last
        if step.order:
            self._begun.noted.order = step.order
        self._shares.given(step.batch)
        return step.batch


def _epoch(epoch: Any) -> int:
    """Return an epoch as an int, also from numpy's integers or a tensor."""
    try:
        number = -1 if isinstance(epoch, bool) else operator.index(epoch)
    except TypeError:
        number = -1
    if not 0 <= number <= _MOST_EPOCH:
        raise UsageError(
            "an epoch is a whole number, counted from 0",
            got=f"set_epoch({epoch!r})"[:80],
            do="for epoch in range(epochs): loader.set_epoch(epoch)",
        )
    return number


def other_order(got: str, expected: str) -> UsageError:
    """Return the error for a position that does not belong to a loader's rows."""
    return UsageError(
        "a position of another dataset or order",
        got=got,
        expected=expected,
        do="load a position of this dataset and sampler, or start anew: loader.set_epoch(epoch)",
    )
