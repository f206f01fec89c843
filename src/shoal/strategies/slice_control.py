"""The control of a bucket's slices that shows whether ranks do the same: turns and marks.

there   every slice has the turn SUM, and the round's mark (marks.py): each owner checks their sums
back    an owner's slice has the turn that it is sent for: every rank checks all turns (turns.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark, Slice, Turn
from shoal.strategies.marks import check, put
from shoal.strategies.turns import Turns


@final
class SliceControl:
    """Turns and marks in the slices of one transfer.

    Args:
        label: the transfer's name in messages.
        slices: each rank's slice.
        own: this rank's slice among them.
    """

    def __init__(self, label: str, slices: Sequence[Slice], own: Slice) -> None:
        self._slices, self._own = slices, own
        self._turns = Turns(label)
        self._mark: Mark | None = None  # mark of the round that is sent

    def put_mark(self, mark: Mark | None) -> None:
        """Put a round's mark into every slice, if it goes with this transfer."""
        self._mark = mark
        put(mark, [part.marks for part in self._slices])

    def put_sum(self) -> None:
        """Write into every slice that it is to be summed."""
        for part in self._slices:
            part.turn.fill_(Turn.SUM)

    def check_sum(self, comm: Comm) -> None:
        """Raise RanksDiffer if a rank's exchange was no sum, or if marks differ."""
        self._turns.check([self._own.turn], Turn.SUM)
        check(self._mark, self._own.marks, comm)

    def put_turn(self, turn: Turn) -> None:
        """Write into the own slice the turn that it is sent for."""
        self._own.turn.fill_(turn)

    def check_turn(self, turn: Turn) -> None:
        """Raise RanksDiffer if a rank has sent its slice for another turn."""
        self._turns.check([part.turn for part in self._slices], turn)
