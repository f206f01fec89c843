"""The job of one model: the module, its loss and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.contracts.batch_loss import given_loss
from shoal.contracts.sample import ComputeLoss
from shoal.core.buckets import MEMORY
from shoal.session.calls import Count


@dataclass(frozen=True)
class TrainingJob:
    """A model, its loss and its optimizers, as every rank gave them to `parallelize`.

    Args:
        model: the module.
        loss_fn: the loss, or None.
        optimizers: the optimizers that hold the model's parameters.
        compute_loss: a function of model and batch, in place of a loss.
        count: a function that counts the terms of a loss.
        left_alone: parameters of optimizers that the program itself keeps equal.
        memory: "fast" or "low".
        weighs: whether uneven rows are weighed.
        alike: whether every rank counts alike, however many rows it has.
        memory_limit: bytes that a rank may hold between steps, if there is a limit.
    """

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizers: Sequence[Optimizer]
    compute_loss: ComputeLoss | None = None
    count: Count | None = None
    left_alone: Sequence[nn.Parameter] = ()
    memory: str = MEMORY[0]
    weighs: bool = True
    alike: bool = False
    memory_limit: float | None = None

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The function that gives the loss, if there is one."""
        return given_loss(self.compute_loss, self.loss_fn)
