"""Differences between owners' pieces and the copies on other ranks, which a codec has not sent yet.

    1  before an update   own pieces get their unsent difference, and so the owner's exact values
    2  the update         changes them
    3  the way back       sends the difference from the copies that all ranks have; all ranks, the
                          owner too, add it as its code says
    4  afterwards         the code's error is unsent; own pieces are the same as on every rank

So replicas have the same bits, and only the rounding of a parameter's own type is ever lost.
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
    """The unsent differences of one transfer's own pieces. Its carrier keeps and saves them."""

    def __init__(self, carrier: Carrier, pieces: Sequence[Piece], rank: int) -> None:
        self._carrier, self.pieces, self._rank = carrier, pieces, rank
        # values on all ranks, for the pieces that are being updated
        self._known: dict[Piece, Tensor] = {}

    def _parts(self) -> Sequence[tuple[Piece, Tensor]]:
        numbers = self._carrier.kept(UNSENT, self._rank)
        parts = numbers.split([piece.numel for piece in self.pieces])
        return list(zip(self.pieces, parts, strict=True))

    def put_in(self, parameters: Collection[Tensor]) -> None:
        """Give the own pieces of these parameters their owner's exact values."""
        for piece, unsent in self._parts():  # 1
            if piece.parameter in parameters:
                own = piece.of(piece.parameter)
                known = self._known[piece] = own.clone()
                own.add_(unsent)
                unsent.sub_(own.to(unsent.dtype) - known.to(unsent.dtype))  # rounding is left

    def forget(self) -> None:
        """Forget all differences, because all ranks get exact new values."""
        self._known.clear()
        self._carrier.kept(UNSENT, self._rank).zero_()

    def changes(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
        """Return new values minus the values on all ranks, and put the latter into `places`."""
        differences = [self._carrier.kept(UNSENT, self._rank).new_empty(0)]
        for piece, value, place in zip(self.pieces, values, places, strict=True):  # 3
            place.copy_(self._known.get(piece, value))
            dtype = differences[0].dtype
            differences.append(value.to(dtype) - place.to(dtype))
        return torch.cat(differences)

    def keep(self, values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Keep new values minus the values that all ranks have now, which are in `places`."""
        for (piece, unsent), value, place in zip(self._parts(), values, places, strict=True):  # 4
            if piece in self._known:
                unsent.add_(value.to(unsent.dtype) - place.to(unsent.dtype))
        self._known.clear()
