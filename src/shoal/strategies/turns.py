"""Checks that every rank takes one exchange for the same: a sum, new parameters, or a reading.

At the host the numbers are looked at at once. On a GPU that would wait for all that it has still to
do. There they come to the host of themselves, and are looked at with a later exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.transfer import Turn
from shoal.core.by_host import Later
from shoal.core.errors import RanksDiffer

_MOST_UNREAD = 4  # exchanges; then the oldest is waited for

_DOES = {
    Turn.SUM: "sums gradients",
    Turn.VALUES: "sends parameters after a step",
    Turn.GRADIENTS: "reads gradients",
}


@final
class Turns:
    """What the ranks took the exchanges of one transfer for.

    Args:
        label: what messages call the transfer.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._unread: deque[tuple[Later, Turn]] = deque()

    def check(self, turns: Sequence[Tensor], own: Turn) -> None:
        """Refuse what came where not every rank takes it for the same.

        Args:
            turns: what came of each rank, or the sum over ranks; on a GPU, looked at later.
            own: what this rank takes it for.

        Raises:
            RanksDiffer: of this exchange, or of an earlier one.
        """
        numbers = torch.cat(list(turns)).real
        if numbers.device.type == "cpu":
            self._require(numbers.tolist(), own)
            return
        self._unread.append((Later(numbers), own))
        while self._unread and (len(self._unread) > _MOST_UNREAD or self._unread[0][0].has_come()):
            later, meant = self._unread.popleft()
            self._require(later.read(), meant)

    def _require(self, turns: Sequence[float], own: Turn) -> None:
        if any(turn != own for turn in turns):
            raise RanksDiffer(
                f"another rank does something else than this one, which {_DOES[own]}",
                where=self._label,
                do="on every rank alike: backward, optimizer.step(), zero_grad, and reading .grad "
                "before it is cleared",
            )
