"""Samplers without an end, or of ten billion rows, are dealt as they come."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from every_kind import Ranks, batch, flat
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from shoal.core.errors import UsageError
from shoal.data import order
from shoal.data.deal import Deal, global_batches, num_batches
from shoal.data.sharded import shard_loader

pytestmark = pytest.mark.quick
ROWS = range(50)


class Forever(Sampler[int]):
    """Shuffles again and again, and counts the rows that were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            for row in torch.randperm(len(ROWS)).tolist():
                self.asked += 1
                yield row


class Lists(Sampler[list[int]]):
    """Batches without an end, of unlike lengths, over a sampler of torch's."""

    def __init__(self) -> None:
        self.sampler = RandomSampler(ROWS)

    def __iter__(self) -> Iterator[list[int]]:
        for number in itertools.count():
            rows = iter(self.sampler)
            yield [next(rows) for _ in range(2 + number % 3)]


class Batches(Dataset[torch.Tensor]):
    """A batch for each number, or the rows that a list names."""

    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor(key) if isinstance(key, list) else batch(key)


def of_rows(sampler: Iterable[int]) -> DataLoader[Any]:
    return DataLoader(ROWS, 4, sampler=sampler)  # type: ignore[arg-type]  # torch takes a range


def drawn(num: float) -> DataLoader[Any]:
    return of_rows(RandomSampler(ROWS, replacement=True, num_samples=int(num)))


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "ten billion": lambda: drawn(1e10),
    "forever": lambda: of_rows(Forever()),
    "lists": lambda: DataLoader(ROWS, batch_sampler=Lists()),  # type: ignore[arg-type]
    "items": lambda: DataLoader(Batches(), None, sampler=drawn(1e10).sampler),
    "lists as items": lambda: DataLoader(
        Batches(), None, sampler=BatchSampler(Forever(), 4, drop_last=False)
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_an_order_without_an_end_is_that_of_one_process(kind: str) -> None:
    alone, ranks = Ranks(LOADERS[kind], 1), Ranks(LOADERS[kind], 2)
    steps = ranks.steps(5)
    assert flat(steps) == flat(alone.steps(10))
    assert all(rows for step in steps for rows in step)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_far_inside_goes_on_exactly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_KEPT", 100)
    before, after = (Ranks(LOADERS[kind], 2) for _ in range(2))
    iterators = [iter(loader) for loader in before.loaders]
    for _ in range(700):
        for each in iterators:
            next(each)
    after.load(json.loads(json.dumps(before.state())))
    expected = [[next(each).tolist() for each in iterators] for _ in range(3)]
    assert after.steps(3) == expected


def test_an_order_is_drawn_as_far_as_it_is_asked_for() -> None:
    sampler = Forever()
    loader = shard_loader(of_rows(sampler), Deal(0, 2), seed=0)
    next(iter(loader))
    next(iter(loader))  # a look shares the order with the pass before
    assert sampler.asked <= 2048


def test_what_no_pass_needs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_KEPT", 1 << 12)
    loader = shard_loader(drawn(1e10), Deal(0, 2), seed=0)
    batches, first = iter(loader), []
    for number in range(1500):
        rows = next(batches).tolist()
        if number < 3:
            first.append(rows)
    assert loader.source.ordered().is_gone is False, "a new one, for another pass"
    again = iter(loader)
    assert [next(again).tolist() for _ in range(3)] == first


def test_the_length_of_ten_billion_rows_is_counted_without_listing_them() -> None:
    assert len(shard_loader(drawn(1e10), Deal(0, 2), seed=0)) == 1_250_000_000
    with pytest.raises(TypeError, match="has no __len__"):
        len(shard_loader(of_rows(Forever()), Deal(0, 2), seed=0))


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_counted_as_they_are_listed(drop_last: bool) -> None:
    for size, whole, num in itertools.product((1, 2, 3), (3, 4, 7), range(3, 40)):
        if drop_last and num < whole:
            with pytest.raises(UsageError):
                num_batches(num, size, whole, drop_last)
        else:
            listed = global_batches(num, size, whole, drop_last)
            assert num_batches(num, size, whole, drop_last) == len(listed)


class Adaptive(Sampler[int]):
    """Gives rows by something that training changes."""

    def __init__(self) -> None:
        self.offset = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(5000):
            yield self.offset

    def __len__(self) -> int:
        return 5000


def test_a_sampler_that_looks_at_training_sees_it() -> None:
    sampler = Adaptive()
    batches = iter(shard_loader(DataLoader(range(2), 4, sampler=sampler), Deal(0, 1), seed=0))
    next(batches)
    sampler.offset = 1
    assert [next(batches).tolist() for _ in range(1000)][-1] == [1] * 4


def test_a_sampler_of_a_finite_order_ends_as_before() -> None:
    """Lengths around whole batches, without `__len__`: as with it."""

    class Some(Sampler[int]):
        def __init__(self, num: int) -> None:
            self.num = num

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.num))

    for num in range(3, 40):
        unknown = Ranks(lambda n=num: DataLoader(ROWS, 4, sampler=Some(n)), 3)  # type: ignore
        known = Ranks(lambda n=num: DataLoader(range(n), 4), 3)  # type: ignore[misc]
        assert unknown.steps() == known.steps()
    with pytest.raises(UsageError, match="2 rows, 3 ranks"):
        Ranks(lambda: DataLoader(ROWS, 4, sampler=Some(2)), 3)  # type: ignore[arg-type]


def test_positions_of_a_release_that_listed_orders_hold() -> None:
    ranks = Ranks(lambda: DataLoader(range(3000), 4, shuffle=True), 2)
    taken = ranks.steps(3)
    whole = list(ranks.loaders[0].source.ordered().units())
    earlier = ranks.state() | {"order": order.digest(whole[::11])}
    again = Ranks(lambda: DataLoader(range(3000), 4, shuffle=True), 2, seed=9)
    again.load(earlier)
    assert flat(again.steps(1)) == whole[len(flat(taken)) :][:8]
