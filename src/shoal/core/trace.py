"""What each thread and link of a rank did and when: plain data that a report draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

MAIN = "main thread"
STEPS = "steps"  # not a thread: whole steps


@dataclass(frozen=True)
class Event:
    """Something that a thread, or the planner's idea of one, was busy with."""

    what: str
    thread: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Rate:
    """What a link carries from a moment on, until the next one is told."""

    link: str
    at_s: float
    mbit_per_s: float


@dataclass
class Recorder:
    """Events and rates of one rank, in seconds since it was made."""

    events: list[Event] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    start_s: float = field(default_factory=perf_counter)

    def note(self, what: str, thread: str, begin_s: float) -> None:
        """Note what began at `begin_s` (time.perf_counter) and ends now; from any thread."""
        self.events.append(
            Event(what, thread, begin_s - self.start_s, perf_counter() - self.start_s)
        )
