"""Progress of training: a bar in a terminal, and a line for each epoch."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from shoal.core.numbers import how_many

_UNMEASURED = 5  # first steps of a run, which warm up and do not count in its median step


@final
class Progress:
    """Counts steps, and shows them on one rank.

    Args:
        console: the console that shows them.
        num_steps: number of steps to come.
        share: this rank's part of the rows of all ranks.
        speaks: whether this is the rank that shows them.
    """

    def __init__(self, console: Console, num_steps: int, share: float, *, speaks: bool) -> None:
        self._console, self._share, self._speaks = console, share, speaks
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (speaks and console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=num_steps)
        self._began_s = self._epoch_began_s = time.perf_counter()
        self._seconds: list[float] = []  # seconds of each step
        self._losses: list[float] = []  # losses of this epoch's steps
        self._rows = self._all_rows = 0.0  # all ranks' rows in this epoch, and in all epochs
        self._loss: float | None = None  # mean loss of the last epoch

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return len(self._seconds)

    @property
    def median_step_s(self) -> float:
        """Seconds of the median step, without the first steps."""
        return statistics.median(self._seconds[_UNMEASURED:] or self._seconds)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def count(self, epoch: int, seconds: float, loss: float, rows: int) -> None:
        """Count a step: its seconds, and its loss over so many rows of this rank."""
        self._seconds.append(seconds)
        self._losses.append(loss)
        self._rows += rows / self._share
        self._all_rows += rows / self._share
        text = f"epoch {epoch + 1} loss {loss:.3f} {self._rate():,.0f} samples/s"
        self._bar.update(self._task, advance=1, description=text)

    def end_epoch(self, epoch: int) -> None:
        """End an epoch, and print its mean loss."""
        if self._losses:
            self._loss = statistics.fmean(self._losses)
            if self._speaks:
                self._console.print(
                    f"epoch {epoch + 1}: loss {self._loss:.4f}, {self._rate():,.0f} samples/s"
                )
        self._losses, self._rows = [], 0
        self._epoch_began_s = time.perf_counter()

    def end(self) -> str:
        """Return a line with the totals of training."""
        seconds = time.perf_counter() - self._began_s
        rows = self._all_rows / max(1, self.num_steps)
        loss = f", loss {self._loss:.4f}" if self._loss is not None else ""
        return (
            f"{how_many(self.num_steps, 'step')} of {how_many(round(rows), 'row')} in "
            f"{seconds:.1f} s: {self._all_rows / seconds:,.0f} samples/s{loss}"
        )

    def _rate(self) -> float:
        return self._rows / (time.perf_counter() - self._epoch_began_s)
