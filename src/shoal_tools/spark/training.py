"""What an estimator's ranks run. Nothing here needs Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.sample import Objective
from shoal.core.errors import UsageError
from shoal.front.checkpoints import Checkpoints
from shoal.front.parallel import parallelize
from shoal.front.request import listed
from shoal.front.together import mean
from shoal.session.session import world
from shoal_tools.spark.factories import check_made
from shoal_tools.spark.parts import Parts, summed


@dataclass(frozen=True)
class FitResult:
    """Weights and losses that one rank of `fit` returns."""

    state: dict[str, Tensor]  # the weights; of rank 0 only
    losses: list[float]  # the mean of each epoch
    validations: list[dict[str, Any]]


@dataclass(frozen=True)
class FitFunction:
    """The work of every rank of `fit`, as a function of its loaders."""

    parts: Parts
    features: str
    label: str
    epochs: int
    seed: int
    checkpoints: str  # a folder, or ""
    interval: int  # steps from one validation to the next; 0: at the end of epochs only

    def batch(self, columns: dict[str, Any]) -> tuple[int, Any]:
        """What the loader gives: a batch beside its number of rows."""
        rows = len(next(iter(columns.values())))
        return rows, self.parts.batch_of(columns, self.features, self.label)

    def __call__(self, loader: Any, validation: Any = None) -> FitResult:
        """Train from the newest checkpoint, or from the start."""
        torch.manual_seed(self.seed)
        model, objective = self.parts.model(), self.parts.objective()
        check_made("model", model)
        optimizer = self.parts.optimizer(model.parameters())
        torch.manual_seed(self.seed + 1 + world().rank)  # each rank drops out on its own
        with ExitStack() as stack:
            checkpoints = self._checkpoints(stack, model, optimizer)
            at = checkpoints.resume() if checkpoints is not None else _start()
            losses, validations = list(at["losses"]), list(at["validations"])
            loader.set_epoch(at["epoch"])
            options = self.parts.options_for(model)
            if at["epoch"] < self.epochs:
                sample = self.parts.sample_of(next(iter(loader))[1])
                model, loss, optimizer = parallelize(
                    model,
                    objective.loss_fn,
                    optimizer,
                    sample=sample,
                    compute_loss=objective.compute_loss,
                    **options,
                )
                objective = objective.by(loss)
            learning = _Learning(
                self, model, objective, listed(optimizer), validation, options.get("count")
            )
            learning.step = at["step"]
            for epoch in range(at["epoch"], self.epochs):
                loss, told = learning.epoch(epoch, loader)
                losses.append(loss)
                validations += told
                if checkpoints is not None:
                    values = {"losses": losses, "validations": validations}
                    checkpoints.step(epoch=epoch + 1, step=learning.step, **values)
                    checkpoints.save()
            state = {name: value.cpu() for name, value in model.state_dict().items()}
        return FitResult(state if world().rank == 0 else {}, losses, validations)

    def _checkpoints(self, stack: ExitStack, model: Any, optimizer: Any) -> Checkpoints | None:
        if not self.checkpoints:
            return None
        objects: dict[str, Any] = {"model": model, **_start()}
        for number, each in enumerate(listed(optimizer)):
            objects[f"optimizer{number or ''}"] = each
        return stack.enter_context(Checkpoints(self.checkpoints, **objects))


def _start() -> dict[str, Any]:
    """What a checkpoint has beside weights, before the first step."""
    return {"epoch": 0, "step": 0, "losses": [], "validations": []}


class _Learning:
    """Epochs of one model, with what is validated in them."""

    def __init__(
        self,
        training: FitFunction,
        model: nn.Module,
        objective: Objective,
        optimizers: Any,
        validation: Any,
        count: Any,
    ) -> None:
        self._training, self._model, self._objective = training, model, objective
        self._optimizers, self._validation, self._count = optimizers, validation, count
        self.step = 0  # that were made, in all epochs

    def epoch(self, epoch: int, loader: Any) -> tuple[float, list[dict[str, Any]]]:
        """The mean loss over the rows of all ranks, and what was validated."""
        interval, told = self._training.interval, []
        total, weights = torch.zeros((), dtype=torch.float64, device="cpu"), 0.0
        self._model.train()
        for loss, weight in self._steps(loader):
            total, weights = total + loss.double().cpu() * weight, weights + weight
            self.step += 1
            if self._validation is not None and interval and self.step % interval == 0:
                told.append(self._validated(epoch))
        if self._validation is not None and not (told and told[-1]["step"] == self.step):
            told.append(self._validated(epoch))
        return mean(float(total) / (weights or 1.0), weight=weights), told

    def _steps(self, loader: Any) -> Iterator[tuple[Tensor, float]]:
        """The loss of each step, and what it counts."""
        for rows, batch in loader:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            found = self._training.parts.found(self._objective, self._model, batch)
            found.loss.backward()
            for optimizer in self._optimizers:
                optimizer.step()
            yield found.loss.detach(), self._weight(rows, found.counted)

    def _weight(self, rows: int, counted: tuple[Any, ...]) -> float:
        return float(rows if self._count is None else self._count(*counted))

    def _validated(self, epoch: int) -> dict[str, Any]:
        """Means over the validation rows of all ranks, on every rank the same (a collective)."""
        parts = self._training.parts
        self._model.eval()
        own = summed(parts, self._objective, self._model, self._validation, self._count)
        self._model.train()
        rows = round(mean(float(own.rows)) * world().size)
        if not rows:
            raise UsageError(
                "no row is marked as one to validate with",
                do="mark some in the column that validationIndicatorCol names, or leave it out",
            )
        loss = mean(own.losses / (own.weight or 1.0), weight=own.weight)
        right = mean(own.right / (own.of_all or 1.0), weight=own.of_all)
        found = {"epoch": epoch, "step": self.step, "loss": loss, "rows": rows}
        return found | {"right": right if parts.metric else None}
