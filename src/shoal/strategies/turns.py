"""Checks that every rank uses one exchange for the same purpose: a sum, new parameters, or a read.

On the host the numbers are read at once. On a GPU that would wait for all its queued work. There
they are copied to the host meanwhile, and read with a later exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.transfer import Turn
from shoal.core.errors import RanksDiffer
from shoal.core.host_copies import Later

_MOST_UNREAD = 4  # exchanges; with more of them the oldest is waited for

_DOES = {
    Turn.SUM: "sums gradients",
    Turn.VALUES: "sends parameters after a step",
    Turn.GRADIENTS: "reads gradients",
}


@final
class Turns:
    """The ranks' purposes for the exchanges of one transfer.

    Args:
        label: the transfer's name in messages.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._unread: deque[tuple[Later, Turn]] = deque()

    def check(self, turns: Sequence[Tensor], own: Turn) -> None:
        """Raise RanksDiffer unless every rank has the same purpose for an exchange.

        Args:
            turns: each rank's number, or their sum over ranks; on a GPU they are read later.
            own: this rank's purpose.

        Raises:
            RanksDiffer: for this exchange, or for an earlier one.
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
