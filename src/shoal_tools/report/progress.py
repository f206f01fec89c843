"""How training goes on: a bar in a terminal, and a line for each epoch."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_UNMEASURED = 5  # first steps of a run, which warm up and are left out of its median step


@final
class Progress:
    """Counts steps, and shows them on one rank.

    Args:
        console: where to.
        num_steps: how many there will be.
        num_ranks: that take as many rows as this one.
        speaks: whether this is the rank that shows them.
    """

    def __init__(self, console: Console, num_steps: int, num_ranks: int, *, speaks: bool) -> None:
        self._console, self._num_ranks, self._speaks = console, num_ranks, speaks
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (speaks and console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=num_steps)
        self._began_s = self._epoch_began_s = time.perf_counter()
        self._seconds: list[float] = []  # of each step
        self._losses: list[float] = []  # of each step of this epoch
        self._rows = 0  # of this epoch, on all ranks

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return len(self._seconds)

    @property
    def median_step_s(self) -> float:
        """What a step takes once all is warm."""
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
        """A step has been made: it took so long, with this loss over so many rows of this rank."""
        self._seconds.append(seconds)
        self._losses.append(loss)
        self._rows += rows * self._num_ranks
        text = f"epoch {epoch + 1} loss {loss:.3f} {self._rate():,.0f} samples/s"
        self._bar.update(self._task, advance=1, description=text)

    def end_epoch(self, epoch: int) -> None:
        """An epoch is over: say what its mean loss was."""
        if self._speaks and self._losses:
            loss = statistics.fmean(self._losses)
            self._console.print(
                f"epoch {epoch + 1}: loss {loss:.4f}, {self._rate():,.0f} samples/s"
            )
        self._losses, self._rows = [], 0
        self._epoch_began_s = time.perf_counter()

    def end(self) -> None:
        """Training is over: say how long it took."""
        if self._speaks:
            self._console.print(
                f"{self.num_steps} steps in {time.perf_counter() - self._began_s:.1f} s, "
                f"median step {self.median_step_s * 1e3:.1f} ms"
            )

    def _rate(self) -> float:
        return self._rows / (time.perf_counter() - self._epoch_began_s)
