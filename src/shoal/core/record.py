"""Run as one document: the facts of `train`, `bench` and `simulate`, from which a report is drawn.

Every part may be missing, because each command writes only its own facts. For the file, see
shoal_tools/report/run_file.py, docs/reference/run-format.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.core.explanation import Explanation
from shoal.core.foresight import Foresight
from shoal.core.outcome import Outcome
from shoal.core.trace import LinkRate, TraceEvent

PREDICTED = "predicted"  # the track of the planner's step
MOST_POINTS = 1000  # largest number of points of a curve
MOST_EVENTS = 5000  # largest number of events of a track


@dataclass(frozen=True)
class Machine:
    """Host of rank 0."""

    processor: str
    cores: int
    torch: str


@dataclass(frozen=True)
class CodecRow:
    """Layer that a codec serves.

    Examples:
        >>> import shoal
        >>> shoal.CodecRow("head", "replicate:ring+int8", 4000, 1016, 0.007, None, True).ratio
        3.937007874015748
    """

    layer: str
    way: str  # the choice as a pin says it
    exact_bytes: float  # bytes that the busiest rank would send for it in a step
    sent_bytes: float  # bytes that it sends
    # relative error of one step, for a layer that is cut of its rows; None before the first step
    step_error: float | None
    # relative error of the mean over 100 steps; None before there were so many
    mean_error: float | None
    coded: bool  # False: its error was too large, and it is exact again

    @property
    def ratio(self) -> float:
        """Factor by which the codec reduces the bytes."""
        return self.exact_bytes / max(self.sent_bytes, 1.0)


@dataclass(frozen=True)
class Track:
    """Work of one rank's threads and links in some steps, or in the predicted one.

    Seconds count from the start of the first step, in the predicted step from the start of its
    backward.
    """

    name: str  # a name such as "rank 0 (h0)", or PREDICTED
    events: tuple[TraceEvent, ...]
    rates: tuple[LinkRate, ...] = ()
    left_out: int = 0  # events that came after the last one here
    interfaces: tuple[str, ...] = ()  # network interfaces of the job; () if they are unknown

    def is_of_job(self, link: str) -> bool:
        """Return whether a link, such as "eth0, sent", carries traffic of the job.

        Examples:
            >>> Track("rank 0", (), interfaces=("eth0",)).is_of_job("docker0, sent")
            False
        """
        return not self.interfaces or link.rpartition(", ")[0] in self.interfaces


@dataclass(frozen=True)
class Curve:
    """Number of each step, as means of so many steps in a row; None: it is not finite."""

    steps_a_point: int
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Training:
    """Course of a training."""

    steps: int
    median_step_s: float
    loss: Curve  # mean over the rows of all ranks
    step_s: Curve  # seconds of rank 0's steps


@dataclass(frozen=True)
class Contender:
    """Shoal, or the software that it is compared with, in a benchmark."""

    name: str
    median_s: float
    rounds_s: tuple[float, ...]
    sent_bytes: float  # bytes a step of the host that sends most
    # ratio of its step to Shoal's, with a 95 % interval; None for Shoal itself
    ratio: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Record:
    """Run of a command."""

    title: str  # name of the recipe, or of the profile
    command: tuple[str, ...] = ()
    date: str = ""
    machine: Machine | None = None
    explanation: Explanation | None = None
    step_s: float | None = None  # the measured median: rank 0's, or over a benchmark's turns
    tracks: tuple[Track, ...] = ()  # the predicted one first
    training: Training | None = None
    contenders: tuple[Contender, ...] = ()  # Shoal first
    codecs: tuple[CodecRow, ...] = ()
    simulation: Foresight | None = None
    outcome: Outcome | None = None


@dataclass
class Series:
    """Number of each step, collected as steps end, in at most so many points.

    Examples:
        >>> series = Series(most=4)
        >>> for value in (1.0, 3.0, 5.0, 7.0, 9.0):
        ...     series.add(value)
        >>> series.curve
        Curve(steps_a_point=2, values=(2.0, 6.0, 9.0))
    """

    most: int = MOST_POINTS
    steps_a_point: int = 1
    _points: list[float] = field(default_factory=list)
    _last: list[float] = field(default_factory=list)  # numbers that do not fill a point yet

    def add(self, value: float) -> None:
        """Add the next step's number."""
        self._last.append(value)
        if len(self._last) < self.steps_a_point:
            return
        self._points.append(math.fsum(self._last) / len(self._last))
        self._last.clear()
        if len(self._points) >= self.most:  # every two points become one
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._last = self._points[len(self._points) // 2 * 2 :] * self.steps_a_point
            self._points = [(one + other) / 2 for one, other in pairs]
            self.steps_a_point *= 2

    @property
    def curve(self) -> Curve:
        """Curve of all numbers so far."""
        last = [math.fsum(self._last) / len(self._last)] if self._last else []
        values = (*self._points, *last)
        finite = (value if math.isfinite(value) else None for value in values)
        return Curve(self.steps_a_point, tuple(finite))
