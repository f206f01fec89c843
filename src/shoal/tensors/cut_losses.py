"""Losses of an output that is cut, from a few numbers for each row.

A row's loss needs its log Σ exp, its target's logit and, with smooth labels, its Σ w·logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor


class RowValues(NamedTuple):
    """Three numbers of each row."""

    log_sum: Tensor  # log Σ exp of its logits
    picked: Tensor  # the target's logit
    summed: Tensor  # Σ w·logit, with the weights of classes


class LossArguments(NamedTuple):
    """Arguments of torch's cross_entropy and nll_loss, after the output."""

    target: Tensor
    weight: Tensor | None = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0  # nll_loss has no such argument

    def are_of_classes(self, shape: torch.Size) -> bool:
        """Return whether the target is a class for each row of this shape, without old options."""
        target, weight = self.target, self.weight
        if target.shape != shape or target.dim() > 1 or target.is_floating_point():
            return False  # it has class probabilities, or classes are not the last dimension
        if self.size_average is not None or self.reduce is not None:
            return False
        return weight is None or not weight.requires_grad

    def checked(self, num_classes: int) -> ClassLoss:
        """Check the targets, and return the loss over so many classes.

        Raises:
            IndexError: a target is not one of the classes.
        """
        flat = self.target.reshape(-1)
        kept = flat != self.ignore_index
        wanted = torch.where(kept, flat, 0)
        if bool(((wanted < 0) | (wanted >= num_classes)).any()):
            raise IndexError(f"a target is not one of {num_classes} classes")
        return ClassLoss(self, num_classes, kept, wanted)


@final
@dataclass(frozen=True)
class ClassLoss:
    """A loss over classes.

    Args:
        arguments: the arguments of the call.
        num_classes: the number of classes.
        kept: whether each row takes part.
        wanted: the class of each row.
    """

    arguments: LossArguments
    num_classes: int
    kept: Tensor
    wanted: Tensor

    def smooth_weights(self, part: Tensor) -> Tensor | None:
        """Return the weights of classes with smooth labels, else None."""
        return self._weights(part) if self.arguments.label_smoothing else None

    def _weights(self, part: Tensor) -> Tensor:
        weight = self.arguments.weight
        return part.new_ones(self.num_classes) if weight is None else weight.to(part.dtype)

    def loss(self, rows: RowValues, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the loss, in `dtype` unless autocast chooses another type."""
        smoothing, reduction = self.arguments.label_smoothing, self.arguments.reduction
        kept, of_class = self.kept, self._weights(part)
        class_weights = torch.where(kept, of_class[self.wanted], 0.0)
        # zeros keep 0 ÷ 0 out of gradients if no row is kept
        losses = torch.where(kept, class_weights * (rows.log_sum - rows.picked), 0.0)
        if smoothing:
            spread = torch.where(kept, of_class.sum() * rows.log_sum - rows.summed, 0.0)
            losses = (1 - smoothing) * losses + smoothing / self.num_classes * spread
        if not torch.is_autocast_enabled(part.device.type):
            losses, class_weights = losses.to(dtype), class_weights.to(dtype)
        if reduction == "none":
            return losses.view(self.arguments.target.shape)
        total = losses.sum()
        return total / class_weights.sum() if reduction == "mean" else total
