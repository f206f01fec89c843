"""What an epoch is: a pass that training belongs to. A rank that peeks alone is not ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from shoal.core.errors import UsageError
from shoal.core.passes import Passes
from shoal.data.deal import Deal
from shoal.data.sharded import shard_loader

Loader = DataLoader[torch.Tensor]
Peek = Callable[[Loader, Loader], object]


class Rank:
    """One rank: a loader to train with, another one to look at."""

    def __init__(self, rank: int, *, trains: bool = True) -> None:
        self.passes = Passes(lambda: trains)

        def made() -> Loader:
            return shard_loader(
                DataLoader(range(24), 3, shuffle=True), Deal(rank, 2), 7, self.passes
            )

        self.loader, self.other = made(), made()

    def step(self) -> None:
        self.passes.forward()
        self.passes.backward()

    def epoch(self, middle: Callable[[], object] = lambda: None) -> list[int]:
        """The rows of an epoch in which each batch is trained on."""
        rows = []
        for number, batch in enumerate(self.loader):
            rows += batch.tolist()
            if number == 2:
                middle()
            self.step()
        return rows


def a_batch(loader: Loader, other: Loader) -> object:
    return next(iter(loader))


def all_of_it(loader: Loader, other: Loader) -> object:
    return list(loader)


def another_loader(loader: Loader, other: Loader) -> object:
    return next(iter(other)), list(other)


def thrice(loader: Loader, other: Loader) -> object:
    return [next(iter(loader)) for _ in range(3)]


PEEKS = [a_batch, all_of_it, another_loader, thrice]


@pytest.mark.quick
@pytest.mark.parametrize("peek", PEEKS)
@pytest.mark.parametrize("when", ["before", "between", "within"])
def test_a_rank_that_peeks_alone_is_not_ahead(peek: Peek, when: str) -> None:
    ranks = [Rank(0), Rank(1)]

    def peeks() -> None:
        peek(ranks[0].loader, ranks[0].other)

    seen = []
    for number in range(4):
        if when == "before" and number == 0:
            peeks()
        if when == "between" and number == 2:
            peeks()
        first = ranks[0].epoch(peeks if when == "within" and number == 1 else lambda: None)
        rows = first + ranks[1].epoch()
        assert sorted(rows) == list(range(24)), "none twice, none lost"
        seen.append(tuple(rows))
    assert len(set(seen)) == 4, "every epoch has an order of its own"


@pytest.mark.quick
def test_one_batch_a_pass_is_another_batch_each_time() -> None:
    ranks = [Rank(0), Rank(1)]
    seen = []
    for _ in range(5):
        rows = [next(iter(rank.loader)).tolist() for rank in ranks]
        assert not set(rows[0]) & set(rows[1])
        seen.append(str(rows))
        for rank in ranks:
            rank.step()
    assert len(set(seen)) == 5


@pytest.mark.quick
def test_of_two_loaders_that_are_trained_on_both_go_on() -> None:
    rank = Rank(0)
    seen = []
    for _ in range(4):
        rows = [next(iter(rank.loader)).tolist(), next(iter(rank.other)).tolist()]
        seen.append(rows)
        rank.step()
    assert len({str(first) for first, _ in seen}) == len({str(second) for _, second in seen}) == 4


@pytest.mark.quick
def test_without_a_model_a_pass_counts_that_went_to_its_end() -> None:
    ranks = [Rank(0, trains=False), Rank(1, trains=False)]
    next(iter(ranks[0].loader))
    seen = []
    for _ in range(3):
        rows = [row for rank in ranks for batch in rank.loader for row in batch.tolist()]
        assert sorted(rows) == list(range(24))
        seen.append(tuple(rows))
    assert len(set(seen)) == 3


@pytest.mark.quick
def test_an_epoch_that_is_set_goes_on_from_there() -> None:
    rank, other = Rank(0), Rank(0)
    epochs = [rank.epoch() for _ in range(4)]
    other.loader.batch_sampler.set_epoch(2)  # type: ignore[union-attr]
    next(iter(other.loader))
    assert [other.epoch(), other.epoch()] == epochs[2:]


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_fetch_ahead_change_nothing(persistent: bool) -> None:
    plain, fetching = Rank(0), Rank(0)
    fetching.loader.num_workers = 0

    def fetched() -> Iterator[list[int]]:
        loader = shard_loader(
            DataLoader(range(24), 3, shuffle=True, num_workers=1, persistent_workers=persistent),
            Deal(0, 2),
            7,
            fetching.passes,
        )
        next(iter(loader))
        for _ in range(3):
            rows = []
            for batch in loader:
                rows += batch.tolist()
                fetching.step()
            yield rows

    assert list(fetched()) == [plain.epoch() for _ in range(3)]


@pytest.mark.quick
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_position_around_the_end_of_an_epoch(ahead: int) -> None:
    """Of a loop that trains on each batch as it comes, and of one that draws another one before."""
    rank, rows, waiting = Rank(0), [], 0
    num = len(rank.loader)
    for _ in range(2):
        for _ in rank.loader:
            waiting += 1
            if waiting > ahead:
                rank.step()
                waiting -= 1
                state = rank.loader.state_dict()
                rows.append(24 * state["epoch"] + sum(state["position"]))
    drawn = range(1 + ahead, 2 * num + 1)  # batches, as each step ends
    if ahead:  # the last of an epoch is not trained on as the first of the next one is drawn
        drawn = [num if batches == num + 1 else batches for batches in drawn]
    assert rows == [24 // num * batches for batches in drawn]


@pytest.mark.quick
@pytest.mark.parametrize("peek", PEEKS)
def test_an_epoch_ends_with_a_pass_that_was_trained_on(peek: Peek) -> None:
    rank, ended = Rank(0), list[int]()
    rank.passes.at_end = lambda: ended.append(rank.loader.state_dict()["epoch"])
    peek(rank.loader, rank.other)
    for number in range(3):
        rank.epoch(lambda: peek(rank.loader, rank.other))
        peek(rank.loader, rank.other)
        assert ended == list(range(1, number + 2))


@pytest.mark.quick
def test_a_loader_that_is_read_beside_training_ends_no_epoch() -> None:
    rank, ended = Rank(0), list[str]()
    beside = iter(rank.other)
    next(beside)  # before a backward, which so belongs to this pass, too
    rank.epoch()
    rank.passes.at_end = lambda: ended.append("epoch")
    rank.epoch(lambda: list(beside))
    assert ended == ["epoch"]
    rank.epoch()
    assert ended == ["epoch"] * 2


@pytest.mark.quick
def test_what_is_drawn_beside_the_last_batch_takes_no_epoch_over() -> None:
    rank, ended = Rank(0), list[str]()
    beside = iter(rank.other)
    next(beside)  # before a backward, which so belongs to this pass, too
    rank.passes.at_end = lambda: ended.append("epoch")
    for _ in range(3):
        batches = iter(rank.loader)
        for number in range(4):
            next(batches)
            if number == 3:
                next(beside)
            rank.step()
        assert not list(batches)
    assert ended == ["epoch"] * 3


@pytest.mark.quick
def test_where_a_thread_draws_ahead_nobody_is_told_of_an_end() -> None:
    rank, ended = Rank(0), list[int]()
    rank.passes.at_end = lambda: ended.append(0)
    rank.epoch()
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(list, rank.loader).result()
    for _ in drawn:
        rank.step()
    assert len(ended) == 1


@pytest.mark.quick
@pytest.mark.parametrize("peek", PEEKS)
@pytest.mark.parametrize("step", [None, 0, 1, 3])
def test_a_look_changes_no_position(peek: Peek, step: int | None) -> None:
    rank, places = Rank(0), []
    for _ in range(2):
        if step is None:
            peek(rank.loader, rank.other)
        for number, _ in enumerate(rank.loader):
            if number == step:
                peek(rank.loader, rank.other)
            rank.step()
            state = rank.loader.state_dict()
            places.append(24 * state["epoch"] + sum(state["position"]))
    assert places == list(range(6, 49, 6))


@pytest.mark.quick
def test_a_position_that_is_gone_on_from_behind_a_look() -> None:
    rank, other, rest = Rank(0), Rank(0), []
    for number, _ in enumerate(rank.loader):
        if number == 1:
            next(iter(rank.loader))
        rank.step()
        if number == 1:
            other.loader.load_state_dict(rank.loader.state_dict())
        elif number > 1:
            rest.append(_.tolist())
    assert [batch.tolist() for batch in other.loader] == rest


@pytest.mark.quick
def test_a_step_without_a_backward_is_a_sign_of_training() -> None:
    rank, seen = Rank(0), []
    for _ in range(3):
        rows = []
        for batch in rank.loader:
            rows.append(batch.tolist())
            rank.passes.note_step()
        seen.append(str(rows))
    assert len(set(seen)) == 3
    assert rank.loader.state_dict()["epoch"] == 3


@pytest.mark.quick
def test_a_second_optimizer_takes_no_look_for_training() -> None:
    rank = Rank(0)
    for _ in rank.loader:
        rank.step()
        rank.passes.note_step()
        rank.passes.note_step()
    next(iter(rank.loader))
    assert rank.loader.state_dict()["epoch"] == 1
    rank.step()
    next(iter(rank.loader))  # drawn behind the backward
    rank.passes.note_step()
    assert (rank.loader.state_dict()["epoch"], rank.loader.state_dict()["position"]) == (1, [6])


@pytest.mark.parametrize("epoch", [-1, "x", 1.0, None, True, 1 << 40], ids=repr)
def test_an_epoch_that_is_none_is_refused(epoch: Any) -> None:
    loader = shard_loader(DataLoader(range(8), 2), Deal(0, 2), 7, Passes())
    loader.set_epoch(torch.tensor(3))
    with pytest.raises(UsageError, match=r"counted from 0(.|\n)*set_epoch\("):
        loader.set_epoch(epoch)
    assert loader.source.epoch == 3
