"""Parameters that the optimizer itself updates, because this rank has all of each."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.owners import norms_of, scale
from shoal.optim.part import Part, States


@final
class WholePart(Part):
    """The parameters that no other part has.

    Args:
        optimizer: the user's optimizer.
        other_parts: all other parts; the list may grow.
        left_alone: parameters that no part has; the set may grow.
    """

    def __init__(
        self, optimizer: Optimizer, other_parts: Sequence[Part], left_alone: Set[Tensor]
    ) -> None:
        super().__init__(optimizer)
        self._other_parts, self._left_alone = other_parts, left_alone

    def has(self, parameter: nn.Parameter) -> bool:
        if parameter in self._left_alone:
            return False
        return not any(part.has(parameter) for part in self._other_parts)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def norms(self, order: float) -> list[Tensor]:
        return list(norms_of(self.local_gradients(), order))

    def scale(self, factor: Tensor) -> None:
        scale(self.local_gradients(), factor)

    def whole_state(self) -> States:
        """Return nothing: whole parameters keep their state in the optimizer."""
        return {}

    def take_state(self) -> None: ...
