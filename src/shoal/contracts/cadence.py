"""Cadence: the event of the engine on which a transfer goes, and how often it goes.

    FORWARD_ENTERED     the model is called, with gradients on
    BACKWARD_ENTERED    a backward comes to the model's output: once for each output
    ROUND_OPENED        the first gradient of a backward that sends is there
    GRADIENTS_LANDED    all gradients of one transfer are there: it goes, after earlier transfers
    BACKWARD_ENDED      the gradients of a backward that sends are global, in `.grad`
    STEP_BEGUN          an optimizer's step begins: nothing is updated yet
    STEP_ENDED          it has ended

An event counts by itself: "every third" is every third of that event since the model was
parallelised. A step belongs to one optimizer. If two optimizers train the model, STEP_BEGUN and
STEP_ENDED happen twice in an iteration. Every rank has the same events in the same order, because
it makes the same calls. Two events are not for cadences: see `Cadence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from shoal.core.errors import UsageError


class Event(Enum):
    """Event that the engine reports to its transfers, and to all other listeners."""

    FORWARD_ENTERED = auto()
    BACKWARD_ENTERED = auto()
    ROUND_OPENED = auto()
    GRADIENTS_LANDED = auto()
    BACKWARD_ENDED = auto()
    STEP_BEGUN = auto()
    STEP_ENDED = auto()


@dataclass(frozen=True)
class Cadence:
    """Times at which a transfer goes, and at which its result is published.

    Args:
        on: the event that it goes on. With `GRADIENTS_LANDED`, as for gradients, the transfer goes
            in each backward that sends. It is published when that backward ends.
        every: it goes on every n-th of these events.
        phase: number of these events to skip before counting begins. Transfers with the same
            `every` and different phases take turns.
        lag: number of these events from when it goes until it is published. With 0 the event waits
            for it.

    Raises:
        UsageError: the numbers do not go together, or no transfer can go on this event.

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
        """Return whether a transfer goes on the event of that number, counted from 0."""
        return number >= self.phase and (number - self.phase + 1) % self.every == 0
