"""Cadence: on which of the engine's events a transfer goes, and every how many of them.

    FORWARD_ENTERED     the model is called, with gradients on
    BACKWARD_ENTERED    a backward comes to the model's output: once for each output
    ROUND_OPENED        the first gradient of a backward that sends is there
    GRADIENTS_LANDED    all gradients of one transfer are there: it goes, behind those before it
    BACKWARD_ENDED      the gradients of a backward that sends are global, in `.grad`
    STEP_BEGUN          an optimizer's step begins: nothing is updated yet
    STEP_ENDED          it has ended

An event counts by itself: "every third" is every third of that event since the model was
parallelised. A step is one optimizer's: if two optimizers train the model, STEP_BEGUN and
STEP_ENDED happen twice in an iteration. Every rank has the same events in the same order, as it
makes the same calls. Two are not for cadences: see `Cadence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from shoal.core.errors import UsageError


class Event(Enum):
    """Something that the engine tells its transfers, and whoever else listens."""

    FORWARD_ENTERED = auto()
    BACKWARD_ENTERED = auto()
    ROUND_OPENED = auto()
    GRADIENTS_LANDED = auto()
    BACKWARD_ENDED = auto()
    STEP_BEGUN = auto()
    STEP_ENDED = auto()


@dataclass(frozen=True)
class Cadence:
    """When a transfer goes, and when its result is published.

    Args:
        on: the event that it goes on. `GRADIENTS_LANDED` is the way of a gradient: the transfer
            goes in each backward that sends, and is published when that ends.
        every: it goes on every so many of these events.
        phase: how many of these events pass before the first that counts. Transfers with the same
            `every` and other phases take turns.
        lag: how many of these events later it is published. With 0 the event waits for it.

    Raises:
        UsageError: the numbers do not go together, or the event is none to go on.

    Examples:
        >>> third = Cadence(Event.STEP_ENDED, every=3)
        >>> [number for number in range(9) if third.goes(number)]
        [2, 5, 8]
    """

    on: Event = Event.GRADIENTS_LANDED
    every: int = 1
    phase: int = 0
    lag: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.phase < 0 or not 0 <= self.lag <= self.every:
            raise UsageError(
                "a cadence needs every ≥ 1, phase ≥ 0, and a lag from 0 to every: a transfer is "
                "published before it goes again",
                got=f"every={self.every}, phase={self.phase}, lag={self.lag}",
                do="choose numbers within these bounds",
            )
        if self.on is Event.BACKWARD_ENTERED:
            raise UsageError(
                "no transfer can go as backward enters the model: that is once for each output, "
                "and not on every rank alike",
                do="let it go on ROUND_OPENED",
            )
        numbers = self.every, self.phase, self.lag
        if self.on is Event.GRADIENTS_LANDED and numbers != (1, 0, 0):
            raise UsageError(
                "what goes as its gradients land goes in every backward",
                got=f"every={self.every}, phase={self.phase}, lag={self.lag}",
                do="let it go on BACKWARD_ENDED",
            )

    def goes(self, number: int) -> bool:
        """Whether a transfer goes on the event of that number, counted from 0."""
        return number >= self.phase and (number - self.phase + 1) % self.every == 0
