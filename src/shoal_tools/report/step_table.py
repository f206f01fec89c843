"""The step by its parts: as a table that adds up to the page's figure.

    account     main threads' time over many steps: compute, exchanges, optimizer (core/outcome)
    recorded    if there is no account: medians of the few steps that the timeline shows

A page shows one of the two. They cover different steps, so their figures for one part differ.
Guarded by tests/tools/report/test_figures.py. Reads core only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shoal.core.numbers import how_many
from shoal.core.outcome import BETWEEN, Outcome
from shoal.core.record import PREDICTED, Record, Track
from shoal.core.trace import STEPS
from shoal_tools.report.drawing import duration
from shoal_tools.report.figures import account, is_account, measured_step
from shoal_tools.report.tracks import StepPart, most_off, step_parts

_COLOURS = (0, 1, 2, 3)  # forward, backward, waits, optimizer; three parts have no forward


@dataclass(frozen=True)
class StepTable:
    """The parts of a step, predicted and measured.

    Args:
        parts: in the order of the step.
        between: the time between steps. It is not predicted, and no figure of a step includes it.
        counts: a sentence about the measured figures; "" if there are none.
        off: the part with the largest error of prediction.
        causes: the known causes of errors, one line each.
    """

    parts: tuple[StepPart, ...]
    between: StepPart | None = None
    counts: str = ""
    off: StepPart | None = None
    causes: tuple[str, ...] = ()

    @property
    def whole(self) -> StepPart:
        """The step: the sum of its parts."""
        predicted = [part.predicted_s for part in self.parts if part.predicted_s is not None]
        measured = [part.measured_s for part in self.parts if part.measured_s is not None]
        return StepPart(
            "the step", sum(predicted) if predicted else None, sum(measured) if measured else None
        )

    @property
    def colours(self) -> tuple[int, ...]:
        """Numbers of the parts' colours, the same as in the timeline."""
        return _COLOURS[-len(self.parts) :]

    @property
    def longest_s(self) -> float:
        """Seconds of the longer step, predicted or measured."""
        return max(self.whole.predicted_s or 0.0, self.whole.measured_s or 0.0) or 1.0


def step_table(record: Record) -> StepTable | None:
    """Return the step by its parts; None if neither a prediction nor a step is known."""
    outcome = record.outcome
    if outcome is not None and outcome.terms and is_account(outcome):
        return _of_account(record, outcome)
    parts = step_parts(record.tracks)
    if not parts:
        return None
    causes = tuple(outcome.causes()) if outcome is not None else ()
    return StepTable(parts, None, _counts_recorded(record.tracks), most_off(parts), causes)


def recorded_steps(tracks: Sequence[Track]) -> str:
    """Return a sentence about the steps that the timeline shows; "" if none was recorded."""
    shown = next((track for track in tracks if track.name != PREDICTED), None)
    took = _steps_s(shown) if shown is not None else []
    if shown is None or not took:
        return ""
    least, most = duration(min(took)), duration(max(took))
    each = least if least == most else f"{least} to {most}"
    return f"Recorded: {how_many(len(took), 'step')}, of {each} on {shown.name}."


def _of_account(record: Record, outcome: Outcome) -> StepTable:
    parts = {
        term.name: StepPart(term.name, term.predicted_s, term.measured_s) for term in outcome.terms
    }
    between, off = parts.pop(BETWEEN, None), outcome.off
    counts = (
        f"Measured: {account(outcome)}. Compute is forward and backward without waits, exchanges "
        "are what the main thread waits for. Data and the program itself, between steps, count in "
        "no step."
    )
    headline = measured_step(record)
    if headline is not None and headline.counts != account(outcome):
        counts += f" The {headline.counts}, is {duration(headline.seconds)}."
    return StepTable(
        tuple(parts.values()),
        between and StepPart("between steps", None, between.measured_s),
        counts,
        parts[off.name] if off is not None else None,
        tuple(outcome.causes()),
    )


def _counts_recorded(tracks: Sequence[Track]) -> str:
    measured = [track for track in tracks if track.name != PREDICTED]
    if not measured:
        return ""
    took = [median(seconds) for seconds in map(_steps_s, measured) if seconds]
    whole = f"; a whole one took {duration(max(took))}" if took else ""
    return f"Measured: medians of the slowest rank, over the steps that were recorded{whole}."


def _steps_s(track: Track) -> list[float]:
    """List the seconds of each whole step that a track shows."""
    return [event.end_s - event.begin_s for event in track.events if event.thread == STEPS]
