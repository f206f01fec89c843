"""A dataset around the user's own, which is told where each pass begins, also in its workers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from shoal.data.source import Position

_MOST_WORKERS = 1024
T_co = TypeVar("T_co", covariant=True)


class ToldDataset(IterableDataset[T_co]):
    """A dataset around the user's own, with the user's attributes.

    Args:
        dataset: the user's dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # seed, epoch and position, shared with workers, which may outlive a pass
        self._told = torch.zeros(3 + _MOST_WORKERS, dtype=torch.int64, device="cpu").share_memory_()

    def tell(self, seed: int, epoch: int, start: Position) -> None:
        """Tell where the next pass begins."""
        told = [seed % 2**62, epoch, len(start), *start]
        self._told[: len(told)] = torch.tensor(told, dtype=torch.int64, device="cpu")

    def told(self) -> tuple[int, int, Position]:
        """Return seed, epoch and position of the pass."""
        seed, epoch, num_told = self._told[:3].tolist()
        return seed, epoch, self._told[3 : 3 + num_told].tolist()

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # a copy is being made, and does not have it yet
            raise AttributeError(name)
        return getattr(self.dataset, name)


def next_part(taken: Position) -> int:
    """Return the part that the batch after a position comes from: workers take turns.

    A part that has ended is behind the others. It gives no batch, and the turn goes on.

    >>> next_part([]), next_part([8, 8, 4]), next_part([8, 8, 8]), next_part([8, 4, 8])
    (0, 2, 0, 0)
    """
    if not taken:
        return 0
    latest = max(part for part, num in enumerate(taken) if num == max(taken))
    return (latest + 1) % len(taken)
