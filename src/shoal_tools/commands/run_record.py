"""Records of a run that `train`, `bench` and `simulate` keep for a report: curves, steps, the plan.

Without `--report` they keep nothing.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from shoal.contracts.comm import Comm
from shoal.core.facts import Cluster
from shoal.core.foresight import Foresight
from shoal.core.outcome import Outcome
from shoal.core.record import (
    MOST_EVENTS,
    PREDICTED,
    Contender,
    Curve,
    Machine,
    Record,
    Series,
    Track,
    Training,
)
from shoal.core.trace import LinkRate, Recorder, TraceEvent
from shoal.engine.engine import Engine
from shoal.front.codec_report import codec_report
from shoal.planner.explain import explain
from shoal.planner.step import Timeline
from shoal.planner.timeline import Predictor, with_settings_of
from shoal.profiling.interfaces import watching
from shoal.profiling.profile_file import Measured
from shoal.session.session import Attached, current
from shoal_tools.commands.job_interfaces import job_interfaces
from shoal_tools.report.run_file import write
from shoal_tools.simulate import explained

_STEPS, _UNMEASURED = 3, 5  # number of recorded steps, and of the steps before them that warm up
_MOST_RANKS = 4  # number of ranks with recorded steps


@final
class History:
    """The curves of a run on one rank, and the work of its threads in some steps.

    Args:
        model: the model that is trained. A new plan may give it another engine.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engine: Engine | None = None  # recorded; None if a process trains alone
        self._recording = ExitStack()
        self._recorder: Recorder | None = None  # set while steps are recorded
        self._recorded = Recorder()
        self._first = _UNMEASURED
        self._steps, self._median_step_s = 0, 0.0
        self._loss, self._seconds = Series(), Series()

    def begin(self, num_steps: int) -> None:
        """Choose the steps to record, given their total number."""
        self._first = min(_UNMEASURED, max(0, num_steps - _STEPS))

    def step_begins(self) -> None:
        """Start or stop recording, if it is time for that."""
        if self._steps == self._first:
            self._recorder = self._recorded = Recorder()
            self._recording.enter_context(watching(self._recorded))
        elif self._steps == self._first + _STEPS:
            self.close()
        if self._recorder is not None:
            self._follow(self._recorder)

    def _follow(self, recorder: Recorder) -> None:
        """Record the engine that works for the model now."""
        attached = current().attached.get(self._model)
        engine = attached.engine if attached is not None else None
        if engine is not None and engine is not self._engine:
            self._recording.enter_context(engine.recording(recorder))
        self._engine = engine

    def note(self, what: str, thread: str, begin_s: float) -> None:
        """Note a part of a step that is over. It began at `begin_s` (time.perf_counter)."""
        # an engine notes the backward itself, without its waits
        if self._recorder is not None and (what != "backward" or self._engine is None):
            self._recorder.note(what, thread, begin_s)

    def on_step_end(self, seconds: float, loss: float) -> None:
        """Note a step's seconds and loss."""
        self._steps += 1
        self._seconds.add(seconds)
        self._loss.add(loss)

    def ended(self, median_step_s: float) -> None:
        """Note the median step of a run that is over."""
        self._median_step_s = median_step_s

    def close(self) -> None:
        """Stop recording."""
        self._recorder = self._engine = None
        self._recording.close()

    def training(self, comm: Comm) -> Training:
        """Return the curves. The loss is the mean over ranks (a collective)."""
        own = self._loss.curve
        ranks: list[Curve] = comm.gather_objects(own, "report: losses", Curve)
        # a rank with another number of steps may have put more of them into a point
        alike = [curve.values for curve in ranks if curve.steps_a_point == own.steps_a_point]
        loss = tuple(map(_mean, zip(*alike, strict=False)))
        return Training(
            self._steps, self._median_step_s, replace(own, values=loss), self._seconds.curve
        )

    def tracks(self, comm: Comm) -> tuple[Track, ...]:
        """Gather the tracks of this run (a collective)."""
        return gathered(comm, self._recorded)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of values; None if one of them is None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def gathered(comm: Comm, recorder: Recorder) -> tuple[Track, ...]:
    """Gather the tracks of all ranks (a collective)."""
    own = recorder, job_interfaces(comm)
    ranks: list[tuple[Recorder, tuple[str, ...]]] = comm.gather_objects(
        own, "report: recorded steps", Recorder, TraceEvent, LinkRate
    )
    return tuple(
        Track(
            f"rank {rank} ({host})",
            tuple(noted.events),
            tuple(noted.rates),
            interfaces=tuple(interfaces),
        )
        for rank, ((noted, interfaces), host) in enumerate(
            zip(ranks, comm.topology.hosts, strict=False)
        )
    )


def kept(tracks: Sequence[Track]) -> tuple[Track, ...]:
    """Keep the tracks of rank 0 and of the slowest ranks, with as many events as a page shows."""
    by_end = sorted(tracks[1:], key=_end_s, reverse=True)[: _MOST_RANKS - 1]
    chosen = [track for track in tracks if track is tracks[0] or track in by_end]
    return tuple(map(_cut, filter(_end_s, chosen)))


def _end_s(track: Track) -> float:
    return max((event.end_s for event in track.events), default=0.0)


def _cut(track: Track) -> Track:
    events = tuple(sorted(track.events, key=lambda event: event.begin_s)[:MOST_EVENTS])
    left_out = len(track.events) - len(events)
    return replace(track, events=events, rates=track.rates[:MOST_EVENTS], left_out=left_out)


def predicted(attached: Attached) -> tuple[Track, ...]:
    """Return the predicted step; () for local steps, which have no timeline."""
    plan, cluster = attached.plan, attached.cluster
    if plan.is_local:
        return ()
    timeline = Predictor(with_settings_of(attached.profile, plan), cluster).as_is(plan)
    return (step_as_track(timeline, cluster),)


def step_as_track(timeline: Timeline, cluster: Cluster) -> Track:
    """Return a predicted step as a track of a page."""
    rates = tuple(timeline.rates(cluster.link.bytes_per_s))
    return _cut(Track(PREDICTED, tuple(timeline.events()), rates))


def report_training(
    path: Path, recipe: Path, model: nn.Module, history: History, outcome: Outcome | None
) -> None:
    """Write the report of a training run, on rank 0 (a collective).

    Args:
        path: the file to write.
        recipe: the recipe that was trained.
        model: the model after training.
        history: the run's history on this rank.
        outcome: the predicted step compared with the measured one.
    """
    comm, attached = current().comm, current().attached.get(model)
    training, tracks = history.training(comm), history.tracks(comm)
    if comm.rank > 0:
        return
    record = _begin(recipe)
    if attached is not None:
        record = replace(
            record,
            explanation=explain(attached.plan, attached.profile, attached.cluster),
            codecs=codec_report(model).rows,
        )
    tracks = (*(predicted(attached) if attached else ()), *kept(tracks))
    step_s = training.median_step_s
    write(replace(record, step_s=step_s, tracks=tracks, training=training, outcome=outcome), path)


def report_benchmark(
    path: Path,
    recipe: Path,
    figures: dict[str, Any],
    model: nn.Module,
    tracks: Sequence[Track],
    outcome: Outcome | None,
) -> None:
    """Write the report of a benchmark, on rank 0.

    path: the file to write.
    recipe: the recipe that was timed.
    figures: the record that `shoal bench --json` writes.
    model: Shoal's model.
    tracks: the ranks' tracks.
    outcome: the predicted step compared with the measured one.
    """
    attached = current().attached[model]
    record = replace(
        _begin(recipe),
        explanation=explain(attached.plan, attached.profile, attached.cluster),
        step_s=figures["median_s"]["shoal"],
        tracks=(*predicted(attached), *kept(tracks)),
        contenders=contenders_of(figures),
        outcome=outcome,
        codecs=codec_report(model).rows,
    )
    write(record, path)


def contenders_of(figures: dict[str, Any]) -> tuple[Contender, ...]:
    """Return Shoal and its peers, from the figures of `shoal bench --json`."""
    ratios = figures["ratio_to_shoal"]
    return tuple(
        Contender(
            name,
            figures["median_s"][key],
            tuple(figures["rounds_s"][key]),
            figures["sent_bytes"][key],
            (ratio["median"], ratio["low"], ratio["high"]) if (ratio := ratios.get(key)) else None,
        )
        for key, name in figures["contenders"].items()
    )


def report_simulation(path: Path, source: Path, measured: Measured, answer: Foresight) -> None:
    """Write the report of a simulation, with the plan for the most hosts.

    Args:
        path: the file to write.
        source: the recipe, or the profile.
        measured: the profile and the cluster that were simulated.
        answer: the result of the simulation.
    """
    record = replace(_begin(source), simulation=answer)
    found = explained(measured.profile, measured.cluster, answer)
    if found is not None:
        explanation, timeline, cluster = found
        step = step_as_track(timeline, cluster)
        record = replace(record, explanation=explanation, tracks=(step,))
    write(record, path)


def _begin(recipe: Path) -> Record:
    """Begin the record of any run."""
    command, date = ("shoal", *sys.argv[1:]), datetime.now(UTC).isoformat(timespec="seconds")
    return Record(recipe.stem, command, date, machine())


def machine() -> Machine:
    """Describe this host."""
    return Machine(_processor(), os.cpu_count() or 1, str(torch.__version__))


def _processor() -> str:
    """Return the processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
