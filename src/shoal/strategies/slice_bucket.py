"""The bucket of parameters that have owners. It has a slice of memory for each owner.

    slice of owner o  │ piece │ piece ···│ flags │ shares │ marks │ turn │

sliced.py explains these parts. The memory is used only while the bucket is open (core/buckets.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.exchange import LiveBucket, Span
from shoal.contracts.strategy import Place
from shoal.contracts.transfer import Slice
from shoal.core.pieces import Piece, spans
from shoal.core.placement import Owner
from shoal.strategies.landing import num_shares
from shoal.strategies.marks import num_marks


def placed(
    sizes: Sequence[int], owners: Sequence[Owner | None], shares: Sequence[float], workers: int
) -> list[list[tuple[int, int, int]]]:
    """Return each rank's spans of parameters of these sizes.

    Placements by turn go round the servers if there are servers, else round the workers.
    """
    turns = range(workers if len(shares) > workers else 0, len(shares))
    return spans(sizes, shares, [None if owner is None else owner.among(turns) for owner in owners])


def width(owned: Sequence[tuple[int, int, int]], itemsize: int) -> int:
    """Return a slice's elements: values, flags, shares, marks and turn; 0 if nothing is owned."""
    if not owned:
        return 0
    num_control = len(owned) + num_shares(itemsize) + num_marks(itemsize) + 1
    return sum(stop - start for _, start, stop in owned) + num_control


@final
class SliceBucket:
    """The slices of all ranks, and the places of each parameter's parts in them.

    Args:
        parameters: parameters of one dtype and device, by dotted name.
        place: the site, and this rank among the ranks.
        shares: the share of the whole that each rank owns, workers first.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], place: Place, shares: Sequence[float]
    ) -> None:
        owners = [place.owners.get(name) for name in parameters]
        inside = [place.spans.get(name, (0, p.numel())) for name, p in parameters.items()]
        rows = placed([stop - start for start, stop in inside], owners, shares, place.ranks)
        listed = tuple(parameters.values())
        self.workers, self.at_server = place.ranks, place.rank >= place.ranks
        self.owned = tuple(  # each rank's pieces
            tuple(
                Piece(listed[i], inside[i][0] + start, inside[i][0] + stop)
                for i, start, stop in row
            )
            for row in rows
        )
        # parameters that end in this bucket
        self.ends = {p for p, (_, stop) in zip(listed, inside, strict=True) if stop == p.numel()}
        self._buckets = place.buckets
        widths = [width(row, listed[0].itemsize) for row in rows]
        self._flat = self._buckets.flat(sum(widths), listed[0])
        wholes = self._flat.split(widths)
        self.slices = [_split(whole, row) for whole, row in zip(wholes, self.owned, strict=True)]
        self.everything = [
            (piece, value)
            for row, part in zip(self.owned, self.slices, strict=True)
            for piece, value in zip(row, part.values, strict=True)
        ]
        # pieces that this rank knows the values of: all of them, or on a server its own
        own = list(zip(self.owned[place.rank], self.slices[place.rank].values, strict=True))
        self.known = own if self.at_server else self.everything
        self.places = {
            p: [pair for pair in self.everything if pair[0].parameter is p] for p in listed
        }

    def live(self, parameters: Mapping[str, nn.Parameter]) -> LiveBucket:
        """Return the bucket as its carrier sees it: values by the names of these parameters.

        Pieces of other parameters come after theirs, and are control to the carrier.
        """
        names = {p: name for name, p in parameters.items()}
        return LiveBucket(
            self._flat,
            tuple(part.whole for part in self.slices),
            tuple(
                tuple(
                    Span(names[piece.parameter], piece.start, piece.stop)
                    for piece in row
                    if piece.parameter in names
                )
                for row in self.owned
            ),
            {name: p.numel() for name, p in parameters.items()},
        )

    def new_slice(self, rank: int) -> Slice:
        """Make a slice of zeros for a rank's pieces, with memory of its own."""
        return _split(torch.zeros_like(self.slices[rank].whole), self.owned[rank])

    def open(self) -> None:
        """Make sure that the bucket has memory."""
        self._buckets.open(self._flat)

    def close(self) -> None:
        """Tell that the memory is not in use."""
        self._buckets.close(self._flat)


def _split(flat: Tensor, pieces: Sequence[Piece]) -> Slice:
    """Divide a flat tensor into a slice: each piece's values in order, then its control.

    Control is the flags, the shares, the marks, and the turn.
    """
    behind = (0,) * 4
    if len(flat):
        behind = (len(pieces), num_shares(flat.itemsize), num_marks(flat.itemsize), 1)
    *values, flags, shares, marks, turn = flat.split([*(piece.numel for piece in pieces), *behind])
    return Slice(flat, tuple(values), flags, shares, marks, turn)
