"""Buffers that hold a layer's global gradients, from their product to `.grad` and after.

A buffer is made once and used again. Where `.grad` is the buffer of the backward before, the new
gradient is added in place, on the lane. Where the user has put another tensor there, it is added to
that as backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn


@final
class FactorGradients:
    """The gradients of one layer's parameters, each in a buffer of its own."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, Tensor] = {}
        self._accumulates: dict[nn.Parameter, bool] = {}

    def begin(self, targets: Iterable[nn.Parameter]) -> None:
        """Note which of these parameters have their buffer as `.grad`."""
        for target in targets:
            self._accumulates[target] = (
                target.grad is not None and target.grad is self._buffers.get(target)
            )

    def accumulates(self, target: nn.Parameter) -> bool:
        """Whether the gradient is to be added to what is in the buffer."""
        return self._accumulates[target]

    def buffer(self, target: nn.Parameter) -> Tensor:
        """The parameter's buffer, made if there is none."""
        if target not in self._buffers:
            # in its strides, which a fused optimizer takes for granted
            self._buffers[target] = torch.empty_like(target)
        return self._buffers[target]

    def publish(self, targets: Iterable[nn.Parameter]) -> None:
        """Have `.grad` be the buffer, or add this to it."""
        for target in targets:
            if target.grad is None or self._accumulates[target]:
                target.grad = self._buffers[target]
            else:
                target.grad.add_(self._buffers[target])

    def tensors(self) -> Sequence[Tensor]:
        """All buffers."""
        return list(self._buffers.values())
