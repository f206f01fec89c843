"""The training loop that an estimator's ranks run. Nothing here needs Spark.

A checkpoint has weights, states of optimizers, the loader's position, and the values of `_start`.
In the middle of an epoch each rank knows the losses of its own rows only. So a checkpoint has their
sum over the ranks, and rank 0 goes on from that sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.sample import Objective
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_SECONDS
from shoal.front.checkpoints import Checkpoints
from shoal.front.parallel import parallelize
from shoal.front.rank_values import mean
from shoal.front.request import listed
from shoal.session.session import world
from shoal_tools.spark.factories import check_made
from shoal_tools.spark.parts import Parts, summed


@dataclass(frozen=True)
class FitResult:
    """Weights and losses that one rank of `fit` returns."""

    state: dict[str, Tensor]  # the weights; empty except on rank 0
    losses: list[float]  # mean loss of each epoch
    validations: list[dict[str, Any]]


@dataclass(frozen=True)
class FitFunction:
    """Work of every rank of `fit`, as a function of its loaders."""

    parts: Parts
    features: str
    label: str
    epochs: int
    seed: int
    checkpoints: str  # a folder, or ""
    interval: int  # steps from one validation to the next; 0: at the end of epochs only
    save_every: int = 0  # steps from one checkpoint to the next; 0: at the end of epochs only

    def batch(self, columns: dict[str, Any]) -> tuple[int, Any]:
        """Make a batch of columns; return the number of rows, and the batch."""
        rows = len(next(iter(columns.values())))
        return rows, self.parts.batch_of(columns, self.features, self.label)

    def __call__(self, loader: Any, validation: Any = None) -> FitResult:
        """Train from the newest checkpoint, or from the start."""
        torch.manual_seed(self.seed)
        model, objective = self.parts.model(), self.parts.objective()
        check_made("model", model)
        optimizer = self.parts.optimizer(model.parameters())
        torch.manual_seed(self.seed + 1 + world().rank)  # each rank has its own dropout
        sample = self.parts.sample_of(next(iter(loader))[1])  # a finished loader gives none
        with ExitStack() as stack:
            checkpoints = self._checkpoints(stack, model, optimizer, loader)
            at = checkpoints.resume() if checkpoints is not None else _start()
            options = self.parts.options_for(model)
            if at["epoch"] < self.epochs:
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
            learning.go_on(at, checkpoints)
            for _ in range(at["epoch"], self.epochs):
                learning.learn(loader)
            state = {name: value.cpu() for name, value in model.state_dict().items()}
        found = learning.at
        weights = state if world().rank == 0 else {}
        return FitResult(weights, found["losses"], found["validations"])

    def _checkpoints(
        self, stack: ExitStack, model: Any, optimizer: Any, loader: Any
    ) -> Checkpoints | None:
        if not self.checkpoints:
            return None
        objects: dict[str, Any] = {"model": model, "loader": loader, **_start()}
        for number, each in enumerate(listed(optimizer)):
            objects[f"optimizer{number or ''}"] = each
        return stack.enter_context(Checkpoints(self.checkpoints, every_s=MOST_SECONDS, **objects))


def _start() -> dict[str, Any]:
    """Return a checkpoint's further values, as they are before the first step."""
    return {"epoch": 0, "step": 0, "losses": [], "validations": [], "begun": _no_sums()}


def _no_sums() -> dict[str, Any]:
    """Return the sums of an epoch over all ranks, before its first step."""
    return {"loss": 0.0, "weight": 0.0, "ranks": 0}


class _Learning:
    """Epochs of one model, with their losses and validations."""

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
        self.at, self._checkpoints = _start(), None  # type: tuple[dict[str, Any], Any]

    def go_on(self, at: Mapping[str, Any], checkpoints: Checkpoints | None) -> None:
        """Go on from the values of a checkpoint, and save to these checkpoints."""
        self.at, self._checkpoints = dict(at), checkpoints
        if at["begun"]["ranks"] != world().size:  # other ranks: the loader restarts the epoch
            self.at["begun"] = _no_sums()

    def learn(self, loader: Any) -> None:
        """Train to the end of the epoch, and note the mean loss over the rows of all ranks."""
        at, training = self.at, self._training
        begun = at["begun"] if world().rank == 0 else _no_sums()
        total = torch.tensor(begun["loss"], dtype=torch.float64, device="cpu")
        weights = begun["weight"]
        self._model.train()
        for loss, weight in self._steps(loader):
            total, weights = total + loss.double().cpu() * weight, weights + weight
            at["step"] += 1
            if training.interval and at["step"] % training.interval == 0:
                self._validate()
            if training.save_every and at["step"] % training.save_every == 0:
                sums = {"loss": _sum(float(total)), "weight": _sum(weights)}
                at["begun"] = {**sums, "ranks": world().size}
                self._save(wait=False)
        self._validate()
        at["losses"] = [*at["losses"], mean(float(total) / (weights or 1.0), weight=weights)]
        at |= {"epoch": at["epoch"] + 1, "begun": _no_sums()}
        self._save(wait=True)

    def _save(self, *, wait: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.step(**self.at)
            self._checkpoints.save(wait=wait)

    def _validate(self) -> None:
        """Validate, unless that was done after this step already."""
        told = self.at["validations"]
        if self._validation is not None and not (told and told[-1]["step"] == self.at["step"]):
            self.at["validations"] = [*told, self._validated()]

    def _steps(self, loader: Any) -> Iterator[tuple[Tensor, float]]:
        """Train step by step; yield the loss of each step, and its weight."""
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

    def _validated(self) -> dict[str, Any]:
        """Compute the means over the validation rows of all ranks (a collective)."""
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
        found = {"epoch": self.at["epoch"], "step": self.at["step"], "loss": loss, "rows": rows}
        return found | {"right": right if parts.metric else None}


def _sum(value: float) -> float:
    """Sum a number over all ranks (a collective)."""
    return mean(value) * world().size
