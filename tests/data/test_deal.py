"""Global batches: a row for every rank, none twice, in the given shares."""

from __future__ import annotations

import pytest

from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal.data.deal import Deal, cut_by, global_batches, shared_by
from shoal.data.shares import FixedShares

pytestmark = pytest.mark.quick


def test_a_last_batch_too_small_for_the_ranks_takes_rows_from_the_one_before() -> None:
    assert global_batches(10, size=4, whole=8, drop_last=False) == [6, 4]
    assert global_batches(10, size=4, whole=4, drop_last=False) == [4, 6]
    assert global_batches(17, size=4, whole=8, drop_last=False) == [8, 5, 4]
    assert global_batches(11, size=4, whole=5, drop_last=False) == [5, 6]


def test_without_shares_rows_are_cut_evenly() -> None:
    assert cut_by(11, 3, None) == cut_sizes(11, 3) == cut_by(11, 3, [1, 1, 1])


@pytest.mark.parametrize("shares", [[1, 3], [1, 1, 100], [0.2, 0.3, 0.5], [5, 1, 1, 1]])
def test_rows_follow_the_shares(shares: list[float]) -> None:
    size = len(shares)
    for num in range(size, 60):
        rows = cut_by(num, size, shares)
        assert sum(rows) == num
        assert min(rows) >= 1
        for got, share in zip(rows, shares, strict=True):
            ideal = num * share / sum(shares)
            assert got == 1 or abs(got - ideal) < size


def test_fewer_items_than_ranks_are_shared_by_neighbours() -> None:
    assert [shared_by(2, Deal(rank, 5)) for rank in range(5)] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
        (1, 0, 2),
        (1, 1, 2),
    ]


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, -1], [1, float("nan")], [1, 2, 3]])
def test_shares_that_are_none_are_refused(shares: list[float]) -> None:
    with pytest.raises(UsageError, match="one positive number a rank"):
        FixedShares(shares, 2)


def test_a_batch_of_all_ranks_must_have_a_row_for_each() -> None:
    with pytest.raises(UsageError, match='batch="rank"'):
        Deal(0, 4, together=True).rows(3)
