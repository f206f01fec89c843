"""Sums over ranks of one owner's pieces, over the backwards between two updates.

    take_in   a backward's sums have come: they are added to what earlier backwards left, or stand
              in its place
    flags     come with them: how many ranks used a parameter. On a GPU they are not looked at where
              this rank used it, too, as that would wait

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
        pieces: this rank's own.
        coming: their slice of the bucket, where one backward's sums come.
        total: memory of its own for the sums over backwards.
    """

    def __init__(self, pieces: Sequence[Piece], coming: Slice, total: Slice) -> None:
        self._pieces, self.coming, self.total = pieces, coming, total
        # parameters to whose earlier sums this backward's are added
        self._carried: set[nn.Parameter] = set()
        self._used: set[nn.Parameter] = set()  # by this rank, in any backward of the sums

    def begin(self, carried: set[nn.Parameter]) -> None:
        """Begin a backward whose sums are added to those of these parameters."""
        self._carried = carried

    def note_used(self, used: Iterable[nn.Parameter]) -> None:
        """Note the parameters that this rank used in the backward."""
        self._used = set(used) | (self._used & self._carried)

    def forget_used(self) -> None:
        """Take this rank for one that used nothing."""
        self._used = set()

    def take_in(self) -> None:
        """Take the backward's sums out of the bucket."""
        if self._carried:
            self._add_up()
        else:
            self.total.whole.copy_(self.coming.whole)

    def _add_up(self) -> None:
        """Add this backward's sums to what earlier ones left, where they left something."""
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
        """How many ranks used each piece's parameter, at least.

        The numbers are not looked at where this rank used them all: on a GPU that would wait.
        """
        if all(piece.parameter in self._used for piece in pieces):
            return (1.0,) * len(pieces)
        return part.flags.tolist()
