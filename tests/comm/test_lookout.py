"""The lookout: how long ranks are waited for, by the reason, and what is said meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.comm import lookout
from shoal.comm.beats import BEATING, Beat, BeatBoard, Verdict
from shoal.comm.lookout import Lookout
from shoal.comm.patience import Patience
from shoal.comm.wait_places import ChannelRecord, ChannelWait, Journal, RankPlace, missed
from shoal.core.errors import DeadlinePassed, PeerLost, RanksDiffer

LOOKS = 40  # in ten seconds
SOON = Patience(computes_s=40.0, elsewhere_s=10.0, silent_s=20.0)


class Others:
    """A board on which other ranks beat, the first `workers` of which train with this one."""

    def __init__(self, ranks: int = 2, workers: int = 0, patience: Patience = SOON) -> None:
        self.rank, self.host, self.journal = 0, "h0", Journal()
        everyone = range(ranks)
        self.record = self.journal.note_opening("lane", everyone, numbered=True)
        self.journals = {rank: Journal() for rank in everyone[1:]}
        self.lanes: dict[int, ChannelRecord] = {
            rank: journal.note_opening("lane", everyone, numbered=True)
            for rank, journal in self.journals.items()
        }
        self.beats = {rank: Beat(host=f"h{rank}") for rank in self.journals}
        self.stale: set[int] = set()
        self.lookout = Lookout(cast(BeatBoard, self), workers or ranks, patience)
        self.record.begin("exchange bucket 3")
        self.journal.waits(self.record, None, "step 7, exchange bucket 3")

    def read(self, rank: int) -> Beat:
        place, count = self.journals[rank].place(), self.beats[rank].count + 1
        self.beats[rank] = Beat(count, f"work {rank}", f"h{rank}", False, BEATING, place)
        return self.beats[rank]

    def is_fresh(self, rank: int) -> bool:
        return rank not in self.stale

    def looks(self, count: int) -> Any:
        """The first verdict of so many looks."""
        return next(filter(None, (self.lookout.look() for _ in range(count))), None)

    def waits(self, rank: int, members: tuple[int, ...], channel: str = "rows") -> ChannelRecord:
        """Let a rank wait for some ranks on a channel of their own."""
        record = self.journals[rank].note_opening(channel, members, numbered=True)
        record.begin("rows of layer 2")
        self.journals[rank].waits(record, None, "rows of layer 2")
        return record

    def told(self, after_s: float) -> DeadlinePassed:
        """The error, which comes after so many seconds and not before."""
        assert self.looks(round(4 * after_s) - 1) is None
        error = self.looks(1).error("rank 0")
        assert isinstance(error, DeadlinePassed)
        return error


@pytest.fixture
def board() -> Others:
    return Others()


def test_it_counts_once_all_are_in(board: Others) -> None:
    board.record.limit_s = 10.0
    assert board.looks(3 * LOOKS) is None  # the other has not come there
    board.lanes[1].begin("exchange bucket 3")
    error = board.told(10)
    assert "that all ranks are in took over 10 s" in str(error)
    assert "step 7, exchange bucket 3" in str(error) and "a link is stuck" in str(error)
    assert "shoal doctor" in str(error) and "MTU" in str(error)


def test_each_exchange_counts_anew(board: Others) -> None:
    board.lanes[1].begin("exchange bucket 3")
    board.record.limit_s = 10.0
    for _ in range(3):
        assert board.looks(LOOKS - 1) is None
        for record in (board.record, board.lanes[1]):
            record.begin("exchange bucket 4")
        board.journal.waits(board.record, None, "step 7, exchange bucket 4")


def test_without_a_plan_the_time_counts_since_the_last_message(board: Others) -> None:
    board.lanes[1].begin("exchange bucket 3")
    for _ in range(3):
        assert board.looks(2 * LOOKS - 1) is None
        board.journal.messages += 1
    assert "brought nothing for 20 s" in str(board.told(20))


def test_a_rank_that_computes_is_waited_for_longest(board: Others) -> None:
    error = board.told(40)
    assert error.rank == 1
    assert "did not end within 40 s: rank 0 (host h0) waited at: step 7, exchange" in error.what
    assert error.got.startswith("absent: rank 1 (host h1), which computes, or does something alone")
    assert "(last at: work 1)" in error.got and "same forward and backward calls" in error.do


def can_answer(record: ChannelRecord) -> None:
    record.answer, record.answers_to = lambda: None, 1


def test_a_rank_that_waits_for_nothing_that_goes_on_is_not_waited_for_long() -> None:
    """As where it waits for one that it has not told of, which no ring shows."""
    board = Others(3)
    board.waits(1, (1, 2))
    board.waits(2, (1, 2), "others")
    can_answer(board.journals[1].note_opening("others", (1, 2), numbered=True))
    found = board.told(10)
    assert found.got == "absent: rank 1 (host h1) and rank 2, waiting at: work 1"


def test_a_rank_that_has_not_beaten_of_late_may_have_gone_on() -> None:
    board = Others(3)
    board.waits(1, (1, 2))
    board.waits(2, (1, 2), "others")
    can_answer(board.journals[1].note_opening("others", (1, 2), numbered=True))
    board.stale.add(1)
    assert board.looks(4 * LOOKS - 1) is None


def test_who_waits_for_a_rank_that_computes_is_waited_for_as_long() -> None:
    board = Others(3)
    board.waits(1, (1, 2))
    board.lanes[2].begin("exchange bucket 3")
    assert board.told(40).rank == 1


def test_an_exchange_of_others_that_goes_on_has_a_limit_of_its_own() -> None:
    board = Others(3)
    for rank in (1, 2):
        board.waits(rank, (1, 2))
    assert board.told(40).rank == 1


def test_of_hosts_that_do_not_train_only_messages_tell() -> None:
    board = Others(3, workers=2)
    board.lanes[1].begin("exchange bucket 3")
    assert board.looks(2 * LOOKS - 1) is None
    board.journal.messages += 1
    assert "rank 2 (host h2), not one of those that train" in board.told(20).got


def test_a_limit_of_the_users_is_kept_to() -> None:
    board = Others(patience=Patience(given_s=5.0))
    assert board.looks(2 * LOOKS // 2 - 1) is None  # gloo's own wait ends by that
    board.journal.messages += 1
    assert "did not end within 5 s" in str(board.told(10))
    assert Patience(5.0).longest_s == Patience(5.0).connects_s == 5.0
    assert (Patience().longest_s, Patience().connects_s) == (1800.0, 300.0)


def test_lines_say_who_waits_for_whom_before_a_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(lookout, "time", SimpleNamespace(monotonic=lambda: clock.now))
    board, lines = Others(patience=Patience()), []
    for second in range(0, 100, 5):
        clock.now = float(second)
        board.looks(2)
        lines += [(second, record.message) for record in caplog.records]
        caplog.clear()
    assert [second for second, _ in lines] == [5, 20, 60]
    assert lines[1][1] == (
        "shoal: rank 0 (host h0) has waited for 20 s at: step 7, exchange bucket 3. It waits for "
        "rank 1 (host h1), which computes, or does something alone (last at: work 1). It gives up "
        "after 30 min"
    )
    board.lanes[1].begin("exchange bucket 3")
    board.record.limit_s = 600.0  # a plan in which a step takes a minute
    board.record.begin("exchange bucket 4")
    board.lanes[1].begin("exchange bucket 4")
    board.journal.waits(board.record, None, "step 7, exchange bucket 4")
    for second in range(200, 420, 10):
        clock.now = float(second)
        board.looks(2)
    assert [record.message.count("a link is slow or stuck") for record in caplog.records] == [1]


def test_ranks_that_were_told_that_they_differ_and_went_on_are_not_judged() -> None:
    """A beat may be older than what ranks have told each other since."""
    board = Others(3)
    for rank, purpose in ((1, "evaluation"), (2, "state_dict")):
        board.lanes[rank].begin(purpose)
    assert board.looks(1) is None
    for lane in board.lanes.values():
        lane.told()
    assert board.looks(2) is None
    for rank, purpose in ((1, "evaluation"), (2, "state_dict")):
        board.lanes[rank].begin(purpose)
    assert board.looks(1) is None
    assert "rank 1 does something else than rank 2" in board.looks(1).what


@pytest.mark.parametrize(
    ("verdict", "kind", "words"),
    [
        (Verdict("a thing", None, broke=True), PeerLost, "a connection was lost: a thing"),
        (Verdict("a thing", None, broke=True), PeerLost, "run `shoal doctor` on every host"),
        (Verdict("a thing", None, deadline=True), DeadlinePassed, "run `shoal doctor`"),
        (Verdict("a thing", 1, differ=True), RanksDiffer, "Then start the job again"),
    ],
)
def test_advice_is_to_the_point(verdict: Verdict, kind: type[Exception], words: str) -> None:
    error = verdict.error("rank 0")
    assert isinstance(error, kind) and words in str(error)


def test_a_rank_is_asked_only_for_calls_that_it_will_certainly_not_make() -> None:
    """It may still come to a call of the round that it is in. Then nobody waits in vain."""
    board = Others(2)
    can_answer(board.journals[1].note_opening("counts", (0, 1), numbered=True))
    (channel,) = board.journals[1].place().answers
    for number, asked in ((1, {channel}), (2, set())):
        wait = ChannelWait(channel, number, "row counts", (0, 1))
        places = {0: RankPlace(wait, {channel: number}, {}), 1: board.journals[1].place()}
        assert missed(1, places) == asked
