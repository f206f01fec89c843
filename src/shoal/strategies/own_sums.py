"""Sums over ranks for one owner's pieces, over all backwards between two updates.

    take_in   a backward's sums have come: they are added to the sums of earlier backwards, or
              replace them
    flags     come with them: the number of ranks that used a parameter. On a GPU they are not
              read if this rank used it too, because reading would wait

Costs the memory of one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from torch import Tensor, nn

from shoal.contracts.transfer import Slice
from shoal.core.pieces import Piece


@final
class OwnSums:
    """The global gradients of this rank's own pieces.

    Args:
        pieces: this rank's own pieces.
        coming: their slice of the bucket, which receives one backward's sums.
        total: separate memory for the sums over backwards.
    """

    def __init__(self, pieces: Sequence[Piece], coming: Slice, total: Slice) -> None:
        self._pieces, self.coming, self.total = pieces, coming, total
        # parameters with earlier sums that this backward's sums are added to
        self._carried: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()  # used by this rank in any backward of the sums

    def begin(self, carried: set[nn.Parameter]) -> None:
        """Begin a backward. It adds to the earlier sums of the `carried` parameters."""
        self._carried = carried

    def note_used(self, used: Iterable[nn.Parameter]) -> None:
        """Note the parameters that this rank used in the backward."""
        self._used = set(used) | (self._used & self._carried)

    def forget_used(self) -> None:
        """Note that this rank used nothing."""
        self._used = set()

    def take_in(self) -> None:
        """Move the backward's sums from the bucket to the total."""
        if self._carried:
            self._add_up()
        else:
            self.total.whole.copy_(self.coming.whole)

    def _add_up(self) -> None:
        """Add this backward's sums to the earlier ones of carried parameters."""
        for index, piece in enumerate(self._pieces):
            value, flag = self.total.values[index], self.total.flags[index]
            if piece.parameter not in self._carried:
                value.zero_()
                flag.zero_()
            value.add_(self.coming.values[index])
            flag.add_(self.coming.flags[index])

    def gradients(self) -> list[Tensor | None]:
        """Return each own piece's gradient, None if no rank used its parameter."""
        flags = self.flags(self._pieces, self.total)
        return [
            value if flag else None for value, flag in zip(self.total.values, flags, strict=True)
        ]

    def flags(self, pieces: Sequence[Piece], part: Slice) -> Sequence[float]:
        """Return, for each piece, how many ranks used its parameter; sometimes fewer, but not 0.

        The numbers are not read if this rank used all of them: on a GPU, reading would wait.
        """
        if all(piece.parameter in self._used for piece in pieces):
            return (1.0,) * len(pieces)
        return part.flags.tolist()
