"""Buffers that hold a layer's global gradients, from their product to `.grad` and after.

A buffer is made once and used again. If `.grad` is still the buffer of the last backward, the lane
adds the new gradient in place. If the user has put another tensor there, the buffer is added to
that tensor as backward ends.
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
        """Return whether the new gradient is added to the buffer's values."""
        return self._accumulates[target]

    def buffer(self, target: nn.Parameter) -> Tensor:
        """Return the parameter's buffer; make it if there is none."""
        if target not in self._buffers:
            # keeps the parameter's strides, because a fused optimizer assumes them
            self._buffers[target] = torch.empty_like(target)
        return self._buffers[target]

    def publish(self, targets: Iterable[nn.Parameter]) -> None:
        """Make `.grad` the buffer, or add the buffer to it."""
        for target in targets:
            if target.grad is None or self._accumulates[target]:
                target.grad = self._buffers[target]
            else:
                target.grad.add_(self._buffers[target])

    def tensors(self) -> Sequence[Tensor]:
        """List all buffers."""
        return list(self._buffers.values())
