"""Pieces with offsets make the whole again, however it was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shoal.checkpoint.extents import Extent, Joining, Owned
from shoal.comm.threads import ThreadComm, run
from shoal.core.pieces import Piece
from shoal.tensors.rank_parameter import OnRank
from shoal.tensors.sharded_parameter import OverRanks

pytestmark = pytest.mark.quick
WHOLE = torch.arange(60.0, dtype=torch.float64).reshape(5, 12)


def joined(pieces: list[tuple[Extent, Tensor]]) -> Tensor:
    joining = Joining(pieces[0][0], pieces[0][1].dtype)
    for extent, piece in pieces:
        joining.add(extent, piece)
    return joining.whole()


@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_tensor_that_is_cut(dim: int | None) -> None:
    def work(comm: ThreadComm) -> tuple[Extent, Tensor]:
        cut = (
            OnRank("one", WHOLE, 1, comm)
            if dim is None
            else OverRanks("one", WHOLE, dim, [[2, 0, 3], [1, 1, 10]][dim], comm)
        )
        return Extent.of_cut(cut), cut.part(WHOLE).contiguous()

    pieces = run(3, work)
    assert torch.equal(joined(pieces), WHOLE)
    with pytest.raises(ValueError, match="of 60 elements"):
        joined(pieces[:1])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_slices_of_owners_lie_in_memory_as_the_parameter(layout: torch.memory_format) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=layout))
    value = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    owned = Owned()
    for start, stop in ((50, 120), (0, 17), (17, 50)):
        piece = Piece(parameter, start, stop)
        owned.add(piece, piece.of(value))
    whole = joined([(extent, piece) for extent, piece in owned.pieces if extent is not None])
    assert torch.equal(whole, value) and whole.stride() == value.stride()


def test_a_value_of_another_form_is_no_piece() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    owned = Owned().add(Piece(parameter, 0, 6), torch.tensor(5.0))
    owned.add(Piece(parameter, 0, 6), 7)
    assert [(extent, float(value)) for extent, value in owned.pieces] == [(None, 5), (None, 7)]


def test_an_extent_that_leaves_its_whole_is_refused() -> None:
    extent = Extent((2, 3), (3, 1), (2,), (1,), 4)
    assert extent.is_sound()
    wrong = [
        replace(extent, offset=5),
        replace(extent, offset=-1),
        replace(extent, stride=(2,)),
        replace(extent, stride=(-1,)),
        replace(extent, layout=(4, 1)),
        replace(extent, size=(2, 1)),
    ]
    for one in wrong:
        assert not one.is_sound()
        with pytest.raises(ValueError, match="where one of"):
            Joining(one, torch.float32).add(one, torch.zeros(2))
    with pytest.raises(ValueError, match="where one of"):
        Joining(extent, torch.float32).add(extent, torch.zeros(2, dtype=torch.float64))
