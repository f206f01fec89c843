"""The control of a bucket's slices that tells whether ranks do the same: turns and marks.

there   every slice has the turn of a sum, and the round's mark (marks.py): their sums are
        checked by each owner
back    an owner's slice has what it sends it for: every rank checks all of them (turns.py)
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
        label: what messages call the transfer.
        slices: each rank's.
        own: this rank's among them.
    """

    def __init__(self, label: str, slices: Sequence[Slice], own: Slice) -> None:
        self._slices, self._own = slices, own
        self._turns = Turns(label)
        self._mark: Mark | None = None  # of the round that the transfer goes with

    def put_mark(self, mark: Mark | None) -> None:
        """Put a round's mark into every slice, if it goes with this transfer."""
        self._mark = mark
        put(mark, [part.marks for part in self._slices])

    def put_sum(self) -> None:
        """Say in every slice that it is to be summed."""
        for part in self._slices:
            part.turn.fill_(Turn.SUM)

    def check_sum(self, comm: Comm) -> None:
        """Raise RanksDiffer where not every rank has summed, or has the same mark."""
        self._turns.check([self._own.turn], Turn.SUM)
        check(self._mark, self._own.marks, comm)

    def put_turn(self, turn: Turn) -> None:
        """Say in the own slice what it is sent for."""
        self._own.turn.fill_(turn)

    def check_turn(self, turn: Turn) -> None:
        """Raise RanksDiffer where not every rank has sent its slice for this."""
        self._turns.check([part.turn for part in self._slices], turn)
