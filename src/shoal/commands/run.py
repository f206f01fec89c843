"""One run of a recipe: its loop, and how it is saved and goes on."""

from __future__ import annotations

import signal
import sys
import time
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
from shoal.data.sharded import ShardedLoader
from shoal.front.checkpoints import Checkpoints
from shoal.front.recipe import Recipe
from shoal.report import text
from shoal.report.progress import Progress
from shoal.session.session import world


@dataclass(frozen=True)
class Run:
    """What one rank trains."""

    recipe: Recipe
    loader: ShardedLoader[Any]
    model: nn.Module
    objective: Objective
    optimizer: Optimizer

    def train(
        self, epochs: int, num_steps: int, folder: Path | None, every_s: float
    ) -> float | None:
        """Train to the end, or until a signal ends the process, once the run is saved.

        Args:
            epochs: passes over the data, at most.
            num_steps: in all, with those before a restart.
            folder: of the run's checkpoints, if it is to be saved.
            every_s: seconds from one to the next.

        Returns:
            The median time of a step, in seconds; None where there was nothing left to do.
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
            console, speaks = text.console(), world().rank == 0
            progress = stack.enter_context(Progress(console, left, world().size, speaks=speaks))
            ended = self._loop(epochs, left, progress, checkpoints)
            progress.end()
            if checkpoints is not None:
                if not ended:
                    checkpoints.save()
                _say(f"weights: {folder}/{name_of(checkpoints.steps)}/model.safetensors")
            if ended:
                _say("saved, as a signal asked; the same command goes on from there")
        if ended:
            sys.exit(128 + signal.SIGTERM)
        return progress.median_step_s

    def _loop(
        self, epochs: int, steps: int, progress: Progress, checkpoints: Checkpoints | None
    ) -> bool:
        """The ordinary loop; whether a signal has ended it."""
        first = self.loader.epoch if checkpoints else 0
        for epoch in range(first, max(epochs, first + 1)):
            if progress.num_steps == steps:
                break  # a stream's epochs had more steps than one
            for batch in islice(map(self.recipe.batch, self.loader), steps - progress.num_steps):
                checked, rows = world().size > 1 or progress.num_steps > 0, num_rows(batch)
                seconds, loss = timed_step(
                    self.model, self.objective, self.optimizer, batch, checked=checked
                )
                progress.count(epoch, seconds, loss, rows=rows)
                if checkpoints is not None and checkpoints.step():
                    return True
            progress.end_epoch(epoch)
        return False


def _say(line: str) -> None:
    if world().rank == 0:
        text.console().print(line, soft_wrap=True)


def num_rows(batch: Any) -> int:
    """Rows of a batch, for what progress shows: those of its first tensor."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 1)


def timed_step(
    model: nn.Module,
    objective: Objective,
    optimizer: Optimizer,
    batch: Any,
    *,
    checked: bool = True,
) -> tuple[float, float]:
    """One ordinary training step: its seconds, and its loss over this rank's rows.

    Where the step is not `checked` yet, as `parallelize` checks one among ranks, what does not fit
    the model or the loss is a SampleError.
    """
    began = time.perf_counter()
    if checked:
        loss = objective.loss(model, batch)
    else:
        loss = Sample.of(model, objective.loss_fn, batch, objective.compute_loss).loss()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = float(loss.detach())
    return time.perf_counter() - began, value
