"""One run of a recipe: its training loop, and its checkpoints."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.checkpoint.run import name_of
from shoal.contracts.batch import tensors_of
from shoal.contracts.sample import Objective, Sample
from shoal.core.trace import MAIN, STEPS
from shoal.data.sharded import ShardedLoader
from shoal.front import text
from shoal.front.checkpoints import Checkpoints
from shoal.front.recipe import Recipe
from shoal.session.session import world
from shoal_tools.commands.run_record import History
from shoal_tools.report.progress import Progress


@dataclass(frozen=True)
class Trained:
    """The totals of a run: seconds of the median step, and a line to print."""

    median_step_s: float
    totals: str


@dataclass(frozen=True)
class Run:
    """One rank's training run."""

    recipe: Recipe
    loader: ShardedLoader[Any]
    model: nn.Module
    objective: Objective
    optimizer: Optimizer
    history: History | None = None  # set if a report is to be written
    share: float = 1.0  # this rank's part of all rows

    def train(
        self, epochs: int, num_steps: int, folder: Path | str | None, every_s: float
    ) -> Trained | None:
        """Train to the end, or until a signal ends the process, once the run is saved.

        Args:
            epochs: passes over the data, at most.
            num_steps: number of all steps, also before a restart.
            folder: folder of the run's checkpoints; None to save none.
            every_s: seconds from one checkpoint to the next.

        Returns:
            The run's totals; None if no step was left to do.
        """
        with ExitStack() as stack:
            checkpoints = None
            if folder is not None:
                checkpoints = Checkpoints(
                    folder,
                    every_s=every_s,
                    signals=True,
                    model=self.model,
                    optimizer=self.optimizer,
                    loader=self.loader,
                )
                stack.enter_context(checkpoints).resume()
            left = num_steps - (checkpoints.steps if checkpoints else 0)
            if left <= 0:
                _say("the run in that folder is complete already")
                return None
            self.model.train()
            if self.history is not None:
                self.history.begin(left)
                stack.callback(self.history.close)
            console, speaks = text.console(), world().rank == 0
            progress = stack.enter_context(Progress(console, left, self.share, speaks=speaks))
            ended = self._loop(epochs, left, progress, checkpoints)
            totals = progress.end()
            if self.history is not None:
                self.history.ended(progress.median_step_s)
            if checkpoints is not None:
                if not ended:
                    checkpoints.save()
                _say(f"weights: {folder}/{name_of(checkpoints.steps)}/model.safetensors")
            if ended:
                _say("saved, as a signal asked; the same command goes on from there")
        if ended:
            _say(totals)
            sys.exit(128 + signal.SIGTERM)
        return Trained(progress.median_step_s, totals)

    def _loop(
        self, epochs: int, steps: int, progress: Progress, checkpoints: Checkpoints | None
    ) -> bool:
        """Run the ordinary loop; return whether a signal has ended it."""
        first = self.loader.epoch if checkpoints else 0
        for epoch in range(first, max(epochs, first + 1)):
            if progress.num_steps == steps:
                break  # a stream's epochs had more steps than one
            for batch in islice(map(self.recipe.batch, self.loader), steps - progress.num_steps):
                checked, rows = world().size > 1 or progress.num_steps > 0, num_rows(batch)
                if self.history is not None:
                    self.history.step_begins()
                seconds, loss = time_step(
                    self.model,
                    self.objective,
                    self.optimizer,
                    batch,
                    checked=checked,
                    note=self.history.note if self.history else _note_nothing,
                )
                progress.count(epoch, seconds, loss, rows=rows)
                if self.history is not None:
                    self.history.on_step_end(seconds, loss)
                if checkpoints is not None and checkpoints.step():
                    return True
            progress.end_epoch(epoch)
        return False


def _note_nothing(what: str, thread: str, begin_s: float) -> None:
    """Note nothing about a step."""


def _say(line: str) -> None:
    if world().rank == 0:
        text.console().print(line, soft_wrap=True)


def num_rows(batch: Any) -> int:
    """Return a batch's number of rows, for progress: the rows of its first tensor."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 1)


def time_step(
    model: nn.Module,
    objective: Objective,
    optimizer: Optimizer,
    batch: Any,
    *,
    checked: bool = True,
    note: Callable[[str, str, float], None] = _note_nothing,
) -> tuple[float, float]:
    """Run one ordinary training step; return its seconds, and its loss over this rank's rows.

    If the step is not `checked`, a batch that does not fit the model or the loss is a SampleError.
    Among ranks `parallelize` has checked it. `note` is called after each part, with its name, its
    thread and its begin.
    """
    began = time.perf_counter()
    if checked:
        loss = objective.loss(model, batch)
    else:
        loss = Sample.of(model, objective.loss_fn, batch, objective.compute_loss).loss()
    note("forward", MAIN, began)
    optimizer.zero_grad()
    backward_s = time.perf_counter()
    loss.backward()
    note("backward", MAIN, backward_s)
    update_s = time.perf_counter()
    optimizer.step()
    note("optimizer", MAIN, update_s)
    value = float(loss.detach())
    note("step", STEPS, began)
    return time.perf_counter() - began, value
