"""Pairs of factors that a rank keeps from a layer's backward until they are sent.

accumulating   a backward leaves pairs, and `.grad` gets a mark of them that takes no memory, if it
               was None
cleared        if user code sets `.grad` to None or to zero, the pairs are dropped too. Any other
               change of it is an error
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from shoal.core.errors import UsageError


@final
class FactorPairs:
    """Pairs of one layer, one for each use of it.

    Args:
        targets: the layer's parameters that get gradients from the pairs.
        label: name of the layer's transfer in messages.
        pin: the pin that serves the layer in another way, for messages.
    """

    def __init__(self, targets: Sequence[nn.Parameter], label: str, pin: str) -> None:
        self._targets, self._label, self._pin = targets, label, pin
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._marks: dict[nn.Parameter, _KeptMark] = {}
        self.kept_for: set[nn.Parameter] = set()  # targets that took gradients as a pair was kept

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, left: Tensor, right: Tensor) -> None:
        """Keep a pair. It has one row for each row of the layer's input."""
        self._pairs.append((left, right))

    def joined(self) -> tuple[Tensor, Tensor]:
        """Return all pairs as one. There must be at least one."""
        if len(self._pairs) == 1:
            return self._pairs[0]
        lefts, rights = zip(*self._pairs, strict=True)
        return torch.cat(lefts), torch.cat(rights)

    def clear(self) -> None:
        """Drop the pairs, because they are sent."""
        self._pairs.clear()
        self.kept_for.clear()

    def mark(self) -> None:
        """Mark `.grad`, so that clearing it is seen and drops the pairs."""
        self.kept_for.update(target for target in self._targets if target.requires_grad)
        for target in self._targets:
            if target.grad is None:
                target.grad = torch.zeros((), dtype=target.dtype, device=target.device).expand_as(
                    target
                )
                self._marks[target] = _KeptMark(target.grad, ours=True)
            else:
                self._marks.setdefault(target, _KeptMark(target.grad, ours=False))

    def drop_if_cleared(self) -> bool:
        """Drop the pairs if `.grad` was cleared since; take marks away. Return whether it was."""
        is_cleared = any(
            mark.is_cleared(target.grad, self._label, self._pin)
            for target, mark in self._marks.items()
        )
        if is_cleared:
            self.clear()
        for target, mark in self._marks.items():
            if mark.ours and target.grad is mark.gradient:
                target.grad = None
        self._marks.clear()
        return is_cleared


@final
class _KeptMark:
    """The `.grad` of a parameter with kept factors, watched so that clearing it drops them."""

    def __init__(self, gradient: Tensor, ours: bool) -> None:
        self.gradient, self.ours = gradient, ours  # ours: a zero tensor put there as a mark
        self._version = gradient._version

    def is_cleared(self, gradient: Tensor | None, where: str, pin: str) -> bool:
        """Return whether it was set to None or to zero; raise UsageError for any other change."""
        if gradient is None:
            return True
        if gradient is self.gradient and gradient._version == self._version:
            return False
        if bool(gradient.any()):
            raise UsageError(
                "a gradient was changed of which a part is kept on this rank, to be sent with the "
                "next backward",
                where=where,
                do="change it after the backward outside of optimizer.accumulate(), or give "
                f"parallelize {pin}",
            )
        return True
