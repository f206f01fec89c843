"""Work of each thread and link of a rank over time: plain data that a report draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

MAIN = "main thread"
STEPS = "steps"  # not a thread: whole steps


@dataclass(frozen=True)
class TraceEvent:
    """Piece of work of one thread, measured or predicted."""

    what: str
    thread: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class LinkRate:
    """Rate of a link, from one report of it to the next."""

    link: str
    at_s: float
    mbit_per_s: float


@dataclass
class Recorder:
    """Events and rates of one rank, in seconds since the recorder was made."""

    events: list[TraceEvent] = field(default_factory=list)
    rates: list[LinkRate] = field(default_factory=list)
    start_s: float = field(default_factory=perf_counter)

    def note(self, what: str, thread: str, begin_s: float) -> None:
        """Note work that began at `begin_s` (time.perf_counter) and ends now.

        Any thread may call it.
        """
        self.events.append(
            TraceEvent(what, thread, begin_s - self.start_s, perf_counter() - self.start_s)
        )
