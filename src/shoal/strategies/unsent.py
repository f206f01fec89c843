"""What owners have made of their pieces and a codec has not brought to the other ranks yet.

    1  before an update   own pieces get what is unsent: they are what their owner has made of them
    2  the update         changes them
    3  the way back       goes the difference from what all ranks have; all take it as it was sent
    4  afterwards         what was lost of it is unsent; own pieces are as on every rank

So replicas have the same bits, and nothing is lost but by the rounding of a parameter's own type.
Costs one number for each element that a rank owns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.exchange import UNSENT, Carrier
from shoal.core.pieces import Piece


@final
class Unsent:
    """Of one transfer's own pieces; kept, and saved, by its carrier."""

    def __init__(self, carrier: Carrier, pieces: Sequence[Piece], rank: int) -> None:
        self._carrier, self.pieces, self._rank = carrier, pieces, rank
        # what all ranks have of the pieces that are being updated
        self._known: dict[Piece, Tensor] = {}

    def _parts(self) -> Sequence[tuple[Piece, Tensor]]:
        numbers = self._carrier.kept(UNSENT, self._rank)
        parts = numbers.split([piece.numel for piece in self.pieces])
        return list(zip(self.pieces, parts, strict=True))

    def put_in(self, parameters: Collection[Tensor]) -> None:
        """Make the own pieces of these what their owner has made of them."""
        for piece, unsent in self._parts():  # 1
            if piece.parameter in parameters:
                own = piece.of(piece.parameter)
                known = self._known[piece] = own.clone()
                own.add_(unsent)
                unsent.sub_(own.to(unsent.dtype) - known.to(unsent.dtype))  # rounding is left

    def forget(self) -> None:
        """All ranks take new values as they are."""
        self._known.clear()
        self._carrier.kept(UNSENT, self._rank).zero_()

    def changes(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """The differences of new values from what all ranks have, which is put in `places`."""
        differences = [self._carrier.kept(UNSENT, self._rank).new_empty(0)]
        for piece, value, place in zip(self.pieces, values, places, strict=True):  # 3
            place.copy_(self._known.get(piece, value))
            dtype = differences[0].dtype
            differences.append(value.to(dtype) - place.to(dtype))
        return torch.cat(differences)

    def keep(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Keep what new values have beyond what all ranks have now, which is in `places`."""
        for (piece, unsent), value, place in zip(self._parts(), values, places, strict=True):  # 4
            if piece in self._known:
                unsent.add_(value.to(unsent.dtype) - place.to(unsent.dtype))
        self._known.clear()
