"""Where batches come from: passes over it, and the position in the global order.

A position counts what all ranks have taken, so any number of ranks can go on from it. Batches that
workers have fetched ahead are not taken yet. What an epoch is: core/passes.py.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, final

from shoal.core.draws import undrawn
from shoal.core.errors import UsageError
from shoal.core.passes import Pass, Passes, PassPosition
from shoal.data.deal import Deal
from shoal.data.shares import Shares

T = TypeVar("T")
Position = list[int]  # rows or batches that all ranks have taken; several where a stream has parts
Fetch = Callable[[], Iterator[Any]]  # begins a pass over what the source prepared
_MOST_EPOCH = 1 << 31
_MOST_BEGUN = 64  # passes of one epoch, most of them peeks


@dataclass(frozen=True)
class LoaderStep(Generic[T]):
    """The batch that this rank takes in one step, and the position behind it."""

    batch: T
    position: Position  # place behind this step
    last: bool = False  # of the epoch
    order: int = 0  # a digest of the pass's order, where it is known only now
    end: int = 0  # rows or batches of the whole stream, where its end was read
    digest: int = 0  # digest of one row that a stream gives in this step
    places: list[Any] = field(default_factory=list)  # places of a stream's parts


@dataclass(frozen=True)
class OwnPlace:
    """The rank that a position belongs to, where each rank has rows of its own."""

    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(eq=False)
class Begun:
    """A pass, and how far it is."""

    noted: Pass
    position: Position
    drawn: bool = False
    steps: int = 0  # steps with a backward
    places: list[Any] = field(default_factory=list)  # places of a stream's parts


class Source(ABC, Generic[T]):
    """Gives one rank its batches, pass after pass."""

    kind: ClassVar[str]  # in positions and messages

    def __init__(self, deal: Deal, seed: int, passes: Passes, own: OwnPlace | None = None) -> None:
        self.deal, self.seed, self.own = deal, seed, own
        self.epoch = 0  # of the passes that begin, until one of them counts
        self.start: Position = []  # where they begin: [] is the start of the epoch
        self._passes, self._begun = passes, list[Begun]()  # in this epoch
        self._left: Begun | None = None  # pass of the epoch before, which may go on behind a look
        passes.loaders += 1
        self._number = passes.loaders

    @abstractmethod
    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """A pass over what is left of the epoch; workers start at once."""

    @abstractmethod
    def num_steps(self) -> int:
        """Of the coming pass. Raises TypeError where nobody knows."""

    @abstractmethod
    def facts(self) -> str:
        """What every rank must have alike, in words."""

    def order(self) -> int:
        """A digest of the coming pass's order; 0 where nobody knows it yet."""
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
        """Make the next pass that of this epoch, as a sampler's `set_epoch` says.

        A loop says it before each pass, also before one that goes on in the middle of that epoch.
        """
        if _epoch(epoch) != self.epoch or any(map(self._counts, self._begun)):
            self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch, from its start.

        Raises:
            UsageError: it is no whole number from 0 on.
        """
        self.epoch, self.start, self._begun, self._left = _epoch(epoch), [], [], None

    def state(self) -> dict[str, Any]:
        """Where the pass is that training belongs to, as plain data."""
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
        """Let the next pass go on from a position.

        Raises:
            UsageError: it is none, or that of another kind of loader, dataset or order.
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
        """Look whether one can go on from the position that was set; `order` is its digest.

        Raises:
            UsageError: one cannot.
        """

    def _advance(self) -> None:
        if any(map(self._counts, self._begun)):
            self._left = self._current()
            self.epoch, self.start, self._begun = self.epoch + 1, [], []

    def _counts(self, begun: Begun) -> bool:
        """Whether a pass is an epoch, also one that went on where nothing was left of it."""
        nothing_left = begun.noted.complete and bool(begun.position) and not begun.drawn
        return self._passes.counts(begun.noted) or nothing_left

    def _current(self) -> Begun | None:
        """The pass that training belongs to; as long as there is no model, the last one."""
        trained = [begun for begun in self._begun if begun.noted.trained]
        if not trained and not self._passes.is_trained():
            trained = [begun for begun in self._begun if begun.drawn]
        latest = [begun for begun in trained if self._passes.is_latest(begun.noted)]
        return (latest or trained)[-1] if trained else self._left


def _undrawn(fetch: Fetch) -> Iterator[Any]:
    """Begin a pass that goes on, and put back torch's random state.

    The DataLoader drew a number as the epoch began, and draws one again. With that, a run that goes
    on would draw others for dropout than one that was never stopped.
    """
    with undrawn():
        return fetch()


@final
class _TrackedPass(Iterator[T]):
    """An iterator over a pass that notes what is taken from it."""

    def __init__(
        self,
        steps: Iterator[LoaderStep[T]],
        begun: Begun,
        passes: Passes,
        shares: Shares,
        is_own: bool,
    ) -> None:
        self._steps, self._begun, self._passes, self._shares = steps, begun, passes, shares
        self._is_own = is_own  # rows of this rank: ranks have only the number of steps alike

    @property
    def is_last(self) -> bool:
        """Whether the batch that was drawn last is known to be the last one."""
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
    """Return an epoch as an int, also if it is one of numpy's or a tensor."""
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
    """The error where a position does not belong to what a loader gives."""
    return UsageError(
        "a position of another dataset or order",
        got=got,
        expected=expected,
        do="load a position of this dataset and sampler, or start anew: loader.set_epoch(epoch)",
    )
