"""The lookout: an exchange that all ranks are in, and that takes far longer than planned."""

from __future__ import annotations

from typing import Any, cast

import pytest

from shoal.comm.beats import BEATING, Beat, BeatBoard
from shoal.comm.lookout import Lookout
from shoal.comm.places import Journal
from shoal.core.errors import DeadlinePassed

LOOKS = 40  # in ten seconds


class OneOther:
    """A board on which one other rank beats."""

    def __init__(self) -> None:
        self.rank, self.journal = 0, Journal()
        self.other = Journal()
        self.record = self.journal.opened("lane", range(2), numbered=True)
        self.theirs = self.other.opened("lane", range(2), numbered=True)
        self.beats = {1: Beat()}
        self.lookout = Lookout(cast(BeatBoard, self), workers=2)

    def read(self, rank: int) -> Beat:
        self.beats[rank] = Beat(
            self.beats[rank].count + 1, "at work", "h1", False, BEATING, self.other.place()
        )
        return self.beats[rank]

    def looks(self, count: int) -> Any:
        """The first verdict of so many looks."""
        return next(filter(None, (self.lookout.look() for _ in range(count))), None)


@pytest.fixture
def board() -> OneOther:
    board = OneOther()
    board.record.begin("exchange bucket 3")
    board.journal.waits(board.record, None, "step 7, exchange bucket 3")
    return board


def test_it_counts_once_all_are_in(board: OneOther) -> None:
    board.record.limit_s = 10.0
    assert board.looks(3 * LOOKS) is None  # the other has not come there
    board.theirs.begin("exchange bucket 3")
    assert board.looks(LOOKS - 1) is None
    verdict = board.looks(1)
    error = verdict.error("rank 0")
    assert isinstance(error, DeadlinePassed)
    assert "that all ranks are in took over 10 s" in str(error)
    assert "step 7, exchange bucket 3" in str(error) and "a link is stuck" in str(error)


def test_each_exchange_counts_anew_and_none_without_a_plan(board: OneOther) -> None:
    board.theirs.begin("exchange bucket 3")
    assert board.looks(3 * LOOKS) is None
    board.record.limit_s = 10.0
    for _ in range(3):
        assert board.looks(LOOKS - 1) is None
        for record in (board.record, board.theirs):
            record.begin("exchange bucket 4")
        board.journal.waits(board.record, None, "step 7, exchange bucket 4")
