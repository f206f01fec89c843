"""Members of rounds with a quorum: when a round calls, when it closes, and for whom it waits."""

from __future__ import annotations

import math

import pytest

from shoal.strategies.round_members import RoundMembers

GRACE_S = 5.0


def members_of(*, quorum: float = 0.75, ranks: int = 4) -> RoundMembers:
    members = RoundMembers(ranks, quorum, GRACE_S)
    members.begin(0.0)
    return members


def come(members: RoundMembers, *ranks: int) -> None:
    for rank in ranks:
        members.come(rank)


def test_closes_at_once_when_all_have_come() -> None:
    members = members_of()
    come(members, 0, 2)
    assert members.closes_in_s(100.0) == math.inf
    come(members, 3, 1)
    assert members.closes_in_s(100.0) == 0
    assert members.close(100.0) == [0, 1, 2, 3]


def test_closes_a_grace_time_after_the_quorum() -> None:
    members = members_of()
    come(members, 0, 1, 3)
    assert members.closes_in_s(20.0) == GRACE_S
    assert members.closes_in_s(24.0) == GRACE_S - 4
    assert members.closes_in_s(25.0) == 0
    assert members.missing == {2}


def test_waits_no_second_time_for_a_rank_that_stays_away() -> None:
    members = members_of()
    come(members, 0, 1, 3)
    members.closes_in_s(20.0)
    members.close(25.0)
    come(members, 0, 1)
    assert members.closes_in_s(30.0) == math.inf
    come(members, 3)
    assert members.closes_in_s(31.0) == 0
    members.close(31.0)
    members.back(2)  # it has come back, late
    come(members, 0, 1, 3)
    assert members.closes_in_s(40.0) == GRACE_S


@pytest.mark.parametrize(("round_s", "calls_s"), [(20.0, 2.0), (1000.0, GRACE_S / 2)])
def test_calls_ranks_that_are_much_slower(round_s: float, calls_s: float) -> None:
    """A tenth of the round's time later, but in time for the grace time."""
    members = members_of()
    assert not members.calls(round_s)
    come(members, 0, 1, 2)
    members.closes_in_s(round_s)
    assert not members.calls(round_s + calls_s)
    assert members.calls(round_s + calls_s + 0.01)


def test_needs_only_ranks_that_make_steps() -> None:
    members = members_of()
    come(members, 3)
    members.away(0)
    members.away(1)
    assert members.need == 2
    assert members.closes_in_s(1.0) == math.inf
    members.end(2)
    assert members.need == 1
    assert members.closes_in_s(1.0) == 0
    assert members.missing == {0, 1}
    members.close(1.0)
    assert members.need == 3, "ranks are away until a round closes"


@pytest.mark.parametrize(
    ("quorum", "ranks", "need"), [(0.75, 4, 3), (0.75, 3, 3), (0.5, 4, 2), (1e-9, 2, 1), (1, 5, 5)]
)
def test_quorum_is_rounded_up(quorum: float, ranks: int, need: int) -> None:
    assert members_of(quorum=quorum, ranks=ranks).need == need
