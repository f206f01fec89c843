"""Every kind of source over 1 to 4 ranks: each row once an epoch, and positions in mid-epoch."""

from __future__ import annotations

import json

import pytest
import torch
from every_kind import KINDS, Made, Numbers, Ranks, flat
from torch.utils.data import DataLoader

from shoal.core.errors import UsageError
from shoal.data.shares import FixedShares

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_comes_once_an_epoch(kind: str, size: int, together: bool) -> None:
    make, num = KINDS[kind]
    ranks, alone = Ranks(make, size, together=together), Ranks(make, 1, together=together)
    for _ in range(2):
        steps = ranks.steps()
        assert sorted(flat(steps)) == list(range(num)), "none twice, none lost"
        assert all(rows for step in steps for rows in step), "every rank has rows in every step"
        assert flat(steps) == flat(alone.steps()), "in the order of one process"


@pytest.mark.parametrize("sizes", [(1, 3), (2, 4), (3, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [False, True])
def test_a_position_goes_on_at_the_next_row(
    kind: str, sizes: tuple[int, int], together: bool
) -> None:
    make, num = KINDS[kind]
    for most in (1, 2, 3):
        before, whole = (Ranks(make, sizes[0], together=together) for _ in range(2))
        whole_epoch = whole.steps()
        if most >= len(whole_epoch):
            break
        taken = before.steps(most)
        state = json.loads(json.dumps(before.state()))
        after = Ranks(make, sizes[1], seed=99, together=together)
        if num - len(flat(taken)) < sizes[1]:
            with pytest.raises(UsageError, match="few"):
                after.load(state)
                after.steps()
            continue
        after.load(state)
        assert after.state() == state
        rest = after.steps()
        assert flat(taken) + flat(rest) == flat(whole_epoch)
        if together and kind != "batch_sampler":  # whose small batches are joined for the ranks
            batches = [flat([step]) for step in [*taken, *rest]]
            assert batches == [flat([step]) for step in whole_epoch]
        assert flat(after.steps()) == flat(whole.steps()), "the next epoch is whole"


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_at_the_end_is_the_next_epoch(kind: str) -> None:
    make, _ = KINDS[kind]
    ranks, other = Ranks(make, 2), Ranks(make, 3, seed=8)
    assert ranks.state()["position"] == []
    ranks.steps(len(ranks.steps()))  # of the second epoch, whose end nobody asks for
    state = ranks.state()
    assert (state["epoch"], state["position"]) == (2, [])
    other.load(state)
    assert flat(other.steps()) == flat(ranks.steps())


@pytest.mark.parametrize("kind", ["rows", "shuffled", "stream"])
def test_rows_in_given_shares(kind: str) -> None:
    make, num = KINDS[kind]
    steps = Ranks(make, 2, shares=FixedShares([1, 3], 2)).steps()
    assert sorted(flat(steps)) == list(range(num))
    assert [len(rows) for rows in steps[0]] == [3, 7]


def test_several_loaders_in_one_step() -> None:
    images, words = (
        Ranks(lambda: DataLoader(range(12), 2, shuffle=True), 2),
        Ranks(lambda: DataLoader(Numbers(12), 2), 2),
    )
    first, second = images.steps(2), words.steps(2)
    assert (images.state()["position"], words.state()["position"]) == ([8], [8])
    assert len(set(flat(first))) == 8
    assert flat(second) == list(range(8))


@pytest.mark.parametrize(
    ("made", "other", "says"),
    [
        (lambda: DataLoader(range(20), 2), lambda: DataLoader(range(19), 2), "another dataset"),
        (
            lambda: DataLoader(range(20), 2, shuffle=True),
            lambda: DataLoader(range(20), 2),
            "another dataset or order",
        ),
        (
            lambda: DataLoader(range(20), 2),
            lambda: DataLoader(Numbers(20), 2),
            r"another kind(?s:.)*got: rows of a sampler(?s:.)*expected: one stream",
        ),
        (lambda: DataLoader(range(20), 2), lambda: DataLoader(Made(), None), "another kind"),
    ],
)
def test_a_position_of_something_else_is_refused(made, other, says) -> None:  # type: ignore[no-untyped-def]
    ranks, others = Ranks(made, 2), Ranks(other, 2)
    ranks.steps(2)
    before = others.state()
    with pytest.raises(UsageError, match=says):
        others.load(ranks.state())
    assert others.state() == before


@pytest.mark.parametrize("state", [{}, {"kind": "one stream"}, {"kind": 3, "seed": "x"}])
def test_what_is_no_position_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no position of a loader"):
        Ranks(lambda: DataLoader(range(20), 2), 1).load(state)


def test_a_stream_that_is_another_is_found_as_it_is_read() -> None:
    before = Ranks(lambda: DataLoader(Numbers(20), 2), 2)
    before.steps(2)
    shorter = Ranks(lambda: DataLoader(Numbers(5), 2), 2)
    shorter.load(before.state())
    with pytest.raises(UsageError, match=r"another dataset(?s:.)*a stream of 5"):
        shorter.steps()
    reordered = Ranks(lambda: DataLoader(Numbers(20, shuffle=True), 2), 2)
    reordered.load(before.state())
    with pytest.raises(UsageError, match="first row"):
        reordered.steps()


def test_a_batch_that_its_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(UsageError, match=r"1 rows, 2 ranks(?s:.)*do this"):
        Ranks(lambda: [torch.zeros(1, 3)], 2).steps()
