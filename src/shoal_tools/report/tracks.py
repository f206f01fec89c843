"""Tracks of a step for a page: the data that its script draws, and the step by its parts.

    {"labels": [["backward", 1], …],                 each with the number of its colour
     "tracks": [{"name": …, "steps": […], "backward": …,
                 "lanes": [{"name": …, "depth": 1, "events": [[label, begin, length, depth], …]}],
                 "links": [{"name": …, "own": true, "most": …, "rates": [[at, Mbit/s], …]}]}, …],
     "end": …}

Times are whole microseconds. The script moves the predicted step so that its backward begins with
the first backward of the rank next to it. Reads core only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.core.record import PREDICTED, Track
from shoal.core.trace import MAIN, STEPS, LinkRate, TraceEvent

# parts of a step: names of main threads' events, the same in measured and predicted steps
FORWARD, BACKWARD, WAITING, OPTIMIZER = "forward", "backward", "wait for gradients", "optimizer"
_PARTS = {
    FORWARD: "forward, with what it waits for",
    BACKWARD: "backward",
    WAITING: "waiting for gradients",
    OPTIMIZER: "optimizer",
}
# beginnings of events' names, in the order of the numbers of their colours
_COLOURS = (FORWARD, BACKWARD, "wait", OPTIMIZER, "exchange", "update")
_LEAST_MBIT = 0.5  # a link that carries less at its busiest is not drawn
_MOST_DEPTH = 3


@dataclass(frozen=True)
class StepPart:
    """One part of a step; None if it was not measured, or not predicted."""

    name: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def off_s(self) -> float:
        """Seconds that it took longer than predicted."""
        if self.predicted_s is None or self.measured_s is None:
            return 0.0
        return self.measured_s - self.predicted_s


def step_parts(tracks: Sequence[Track]) -> tuple[StepPart, ...]:
    """Return the parts of a step, predicted and of the slowest rank; () without any track."""
    predicted = [_parts(track) for track in tracks if track.name == PREDICTED]
    measured = [_parts(track) for track in tracks if track.name != PREDICTED]
    slowest = max(measured, key=lambda parts: sum(parts.values()), default=None)
    if not predicted and not slowest:
        return ()
    return tuple(
        StepPart(
            name,
            predicted[0][key] if predicted else None,
            slowest[key] if slowest else None,
        )
        for key, name in _PARTS.items()
    )


def most_off(parts: Sequence[StepPart]) -> StepPart | None:
    """Return the part with the largest error of prediction, if any was measured."""
    worst = max(parts, key=lambda part: abs(part.off_s), default=None)
    return worst if worst is not None and worst.off_s else None


def _parts(track: Track) -> dict[str, float]:
    """Return the median seconds of each part."""
    seconds: dict[str, list[float]] = {key: [] for key in _PARTS}
    for event in track.events:
        for key, found in seconds.items():
            if event.thread == MAIN and event.what.partition(",")[0] == key:
                found.append(event.end_s - event.begin_s)
    return {key: median(found) if found else 0.0 for key, found in seconds.items()}


def drawn(tracks: Sequence[Track]) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    labels: dict[str, int] = {}
    shown = [_track(track, labels) for track in tracks]
    latest = max((track["backward"] for track in shown), default=0)
    # the predicted step may be moved that far
    ends = [track["end"] + latest * (track["name"] == PREDICTED) for track in shown]
    end = max(1, *ends)
    return {
        "labels": [[what, _colour(what)] for what in labels],
        "tracks": shown,
        "end": end,
        "window": _window(shown, end),
    }


def _track(track: Track, labels: dict[str, int]) -> dict[str, Any]:
    by_thread: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in track.events:
        by_thread[event.thread].append(event)
    steps = by_thread.pop(STEPS, [])
    ends = [_us(event.end_s) for event in track.events]
    begins = [_us(event.begin_s) for event in track.events if event.what == BACKWARD]
    return {
        "name": track.name,
        "left_out": track.left_out,
        "steps": [_us(event.begin_s) for event in steps],
        "backward": min(begins, default=0),
        "lanes": [
            _lane(name, by_thread[name], labels)
            for name in sorted(by_thread, key=lambda name: (name != MAIN, name))
        ],
        "links": _links(track),
        "end": max(ends, default=0),
    }


def _lane(name: str, events: Sequence[TraceEvent], labels: dict[str, int]) -> dict[str, Any]:
    """Return a thread's events, each with its depth inside other events."""
    rows, open_ends, deepest = [], list[float](), 0
    for event in sorted(events, key=lambda event: (event.begin_s, -event.end_s)):
        while open_ends and open_ends[-1] <= event.begin_s:
            open_ends.pop()
        depth = min(len(open_ends), _MOST_DEPTH - 1)
        open_ends.append(event.end_s)
        deepest = max(deepest, depth)
        label = labels.setdefault(event.what, len(labels))
        long = max(0, _us(event.end_s - event.begin_s))
        rows.append([label, _us(event.begin_s), long, depth])
    return {"name": name, "depth": deepest + 1, "events": rows}


def _links(track: Track) -> list[dict[str, Any]]:
    """List the rates of interfaces. `own` marks the job's interfaces, which are shown at first."""
    by_link: dict[str, list[LinkRate]] = defaultdict(list)
    for rate in track.rates:
        by_link[rate.link].append(rate)
    return [
        {
            "name": link,
            "own": track.is_of_job(link),
            "most": round(most, 1),
            "rates": [[_us(rate.at_s), round(rate.mbit_per_s, 1)] for rate in told],
        }
        for link, told in sorted(by_link.items())
        if (most := max(rate.mbit_per_s for rate in told)) >= _LEAST_MBIT
    ]


def _window(tracks: Sequence[Mapping[str, Any]], end: int) -> list[int]:
    """Return the window at first: one step, of the first rank and as it was predicted."""
    ranks = [track for track in tracks if track["name"] != PREDICTED]
    if not ranks:
        return [0, end]
    first, steps = ranks[0], ranks[0]["steps"]
    predicted = [track["end"] for track in tracks if track["name"] == PREDICTED]
    ends = [steps[1] if len(steps) > 1 else end, *(first["backward"] + at for at in predicted)]
    return [0, min(end, max(ends))]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _colour(what: str) -> int:
    """Return the number of its colour; an unknown event has the last one."""
    numbers = (n for n, beginning in enumerate(_COLOURS) if what.startswith(beginning))
    return next(numbers, len(_COLOURS))
