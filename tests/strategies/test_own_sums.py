"""Sums of own pieces: backwards add up where they carry on, and stand alone where they do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.contracts.transfer import Slice
from shoal.core.pieces import Piece
from shoal.strategies.own_sums import OwnSums

pytestmark = pytest.mark.quick
A, B = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
PIECES = (Piece(A, 0, 2), Piece(B, 1, 3))


def zeros() -> Slice:
    whole = torch.zeros(6)
    first, second, flags, nothing = whole.split([2, 2, 2, 0])
    return Slice(whole, (first, second), flags, nothing, nothing, nothing)


def come(sums: OwnSums, value: float, flags: list[float]) -> None:
    """Let a backward's sums come."""
    sums.coming.sums.fill_(value)
    sums.coming.flags.copy_(torch.tensor(flags))
    sums.take_in()


def found(sums: OwnSums) -> list[list[float] | None]:
    return [None if gradient is None else gradient.tolist() for gradient in sums.gradients()]


def test_a_backward_takes_the_place_of_what_was_there():
    sums = OwnSums(PIECES, zeros(), zeros())
    come(sums, 1.0, [2.0, 0.0])
    assert found(sums) == [[1.0, 1.0], None]
    sums.begin(set())
    come(sums, 2.0, [0.0, 1.0])
    assert found(sums) == [None, [2.0, 2.0]]


def test_sums_are_added_to_those_that_are_carried_only():
    sums = OwnSums(PIECES, zeros(), zeros())
    come(sums, 1.0, [1.0, 1.0])
    sums.begin({A})
    come(sums, 2.0, [0.0, 1.0])
    assert found(sums) == [[3.0, 3.0], [2.0, 2.0]]


def test_flags_are_not_looked_at_where_this_rank_used_all():
    sums = OwnSums(PIECES, zeros(), zeros())
    unread = zeros()  # of flags 0, as if nobody had used them
    sums.note_used([A, B])
    assert list(sums.flags(PIECES, unread)) == [1.0, 1.0]
    sums.begin({A})
    sums.note_used([])
    assert list(sums.flags(PIECES[:1], unread)) == [1.0]  # used in the backward before
    assert list(sums.flags(PIECES, unread)) == [0.0, 0.0]
    sums.forget_used()
    assert list(sums.flags(PIECES[:1], unread)) == [0.0, 0.0]
