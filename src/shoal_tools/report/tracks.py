"""Tracks of a step for a page: what its script draws, and the step by its parts.

    {"labels": [["backward", 1], …],                 each with the number of its colour
     "tracks": [{"name": …, "steps": […], "backward": …,
                 "lanes": [{"name": …, "depth": 1, "events": [[label, begin, length, depth], …]}],
                 "links": [{"name": …, "own": true, "most": …, "rates": [[at, Mbit/s], …]}]}, …],
     "end": …}

Times are whole microseconds. The script lays the predicted step so that its backward begins where
the first one of the rank beside it does. Reads core only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.core.record import PREDICTED, Track
from shoal.core.trace import MAIN, STEPS, LinkRate, TraceEvent

# parts of a step by the events of main threads: measured ones, and what predictions call them
FORWARD, BACKWARD, WAITING, OPTIMIZER = "forward", "backward", "wait for gradients", "optimizer"
_PARTS = {
    FORWARD: "forward, with what it waits for",
    BACKWARD: "backward",
    WAITING: "waiting for gradients",
    OPTIMIZER: "optimizer",
}
# beginnings of what events are called, by the number of their colour
_COLOURS = (FORWARD, BACKWARD, "wait", OPTIMIZER, "exchange", "update")
_LEAST_MBIT = 0.5  # of a link at its busiest: one that carries less is not drawn
_MOST_DEPTH = 3


@dataclass(frozen=True)
class StepPart:
    """One part of a step; None where nobody measured, or predicted, it."""

    name: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def off_s(self) -> float:
        """By how much it took longer than predicted."""
        if self.predicted_s is None or self.measured_s is None:
            return 0.0
        return self.measured_s - self.predicted_s


def step_parts(tracks: Sequence[Track]) -> tuple[StepPart, ...]:
    """The step by its parts, predicted and of the slowest rank; () without any track."""
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
    """The part whose prediction is off most, if any was measured."""
    worst = max(parts, key=lambda part: abs(part.off_s), default=None)
    return worst if worst is not None and worst.off_s else None


def _parts(track: Track) -> dict[str, float]:
    """Median seconds of each part."""
    seconds: dict[str, list[float]] = {key: [] for key in _PARTS}
    for event in track.events:
        for key, found in seconds.items():
            if event.thread == MAIN and event.what.partition(",")[0] == key:
                found.append(event.end_s - event.begin_s)
    return {key: median(found) if found else 0.0 for key, found in seconds.items()}


def drawn(tracks: Sequence[Track]) -> dict[str, Any]:
    """What the page's script draws."""
    labels: dict[str, int] = {}
    shown = [_track(track, labels) for track in tracks]
    latest = max((track["backward"] for track in shown), default=0)
    # of the predicted step, wherever it is laid
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
    """A thread's events, each as deep as it lies inside others."""
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
    """List the rates of interfaces; `own` says that one is the job's, and is shown unasked."""
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
    """What is seen at first: one step, as the first rank made it and as it was predicted."""
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
    """The number of its colour; what nobody knows has the last one."""
    numbers = (n for n, beginning in enumerate(_COLOURS) if what.startswith(beginning))
    return next(numbers, len(_COLOURS))
