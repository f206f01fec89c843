"""Control of slices: a rank that takes an exchange for something else is told of."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.threads import ThreadComm
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark, Slice, Turn
from shoal.core.errors import RanksDiffer
from shoal.strategies.marks import num_marks
from shoal.strategies.slice_control import SliceControl

pytestmark = pytest.mark.quick
NUM_MARKS = num_marks(4)


class Told(Mark):
    word = 7

    def compare(self, comm: Comm) -> None:
        raise RanksDiffer("marks differ")


def empty() -> Slice:
    whole = torch.zeros(NUM_MARKS + 1)
    marks, turn = whole.split([NUM_MARKS, 1])
    return Slice(whole, (), whole[:0], whole[:0], marks, turn)


def control() -> tuple[SliceControl, list[Slice]]:
    slices = [empty(), empty()]
    return SliceControl("a bucket", slices, slices[0]), slices


def test_sums_of_one_turn_and_one_mark_pass():
    told, slices = control()
    told.put_mark(Told())
    told.put_sum()
    assert all(int(part.turn) == Turn.SUM for part in slices)
    slices[0].whole.add_(slices[1].whole)  # both ranks told the same
    told.check_sum(ThreadComm())


def test_a_rank_with_another_mark_is_told_of():
    told, slices = control()
    told.put_mark(Told())
    told.put_sum()
    slices[0].marks.add_(torch.tensor([1.0, 3.0, 9.0, 0.0, 0.0]))
    with pytest.raises(RanksDiffer, match="marks differ"):
        told.check_sum(ThreadComm())


def test_a_rank_that_sends_values_where_others_sum_is_told_of():
    told, slices = control()
    told.put_mark(None)
    told.put_sum()
    slices[0].turn.add_(Turn.VALUES)
    with pytest.raises(RanksDiffer, match="sums gradients"):
        told.check_sum(ThreadComm())


def test_all_slices_that_come_back_must_be_sent_for_the_same():
    told, slices = control()
    told.put_turn(Turn.VALUES)
    slices[1].turn.fill_(Turn.VALUES)
    told.check_turn(Turn.VALUES)
    slices[1].turn.fill_(Turn.GRADIENTS)
    with pytest.raises(RanksDiffer, match="sends parameters"):
        told.check_turn(Turn.VALUES)
