"""Streams of which each rank has its own end the epoch together, and nothing waits for ever."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using

pytestmark = pytest.mark.quick


class Own(IterableDataset[int]):
    """Rows of one rank, which go on from a state of its own."""

    def __init__(self, start: int, num: int) -> None:
        self.start, self.num, self.taken, self.resumed = start, num, 0, 0

    def __iter__(self) -> Iterator[int]:
        begin, self.resumed = self.resumed, 0
        for number in range(begin, self.num):
            self.taken = number + 1
            yield self.start + number

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resumed = self.taken = state["taken"]


def lists(loader: Any, most: int | None = None) -> list[list[int]]:
    taken = []
    for batch in loader:
        taken.append(batch.tolist())
        if len(taken) == most:
            break
    return taken


@pytest.mark.parametrize("nums", [(7, 7), (8, 5), (5, 9, 7), (2, 9), (6,)])
def test_streams_end_together(nums: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, **_: told.append(text))

    def work(comm: ThreadComm) -> list[list[list[int]]]:
        with using(comm):
            own = DataLoader(Own(100 * comm.rank, nums[comm.rank]), 2)
            loader = shoal.shard(own, shards_itself=True)
            return [lists(loader) for _ in range(2)]

    for epoch in zip(*run(len(nums), work), strict=True):
        for rank, batches in enumerate(epoch):
            assert len(batches) == -(-min(nums) // 2)
            rows = [row - 100 * rank for each in batches for row in each]
            assert rows == list(range(len(rows)))
    least = -(-min(nums) // 2)
    for rank, num in enumerate(nums):
        leaves = any(f"rank {rank} leaves rows of its stream" in text for text in told)
        assert leaves == (-(-num // 2) > least)


def test_a_look_at_one_batch_is_no_message() -> None:
    def work(comm: ThreadComm) -> int:
        with using(comm):
            loader = shoal.shard(DataLoader(Own(0, 9), 2), shards_itself=True)
            if comm.rank == 0:
                next(iter(loader))
            return len(lists(loader))

    assert run(2, work) == [5, 5]


def test_ranks_that_take_unlike_numbers_of_batches_are_told() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm):
            loader = shoal.shard(DataLoader(Own(0, 20), 2), shards_itself=True)
            lists(loader, 3 + comm.rank)
            lists(loader, 3)

    with pytest.raises(RanksDiffer, match="take as many batches on every rank"):
        run(2, work)


def test_a_batch_of_all_ranks_is_shared_out() -> None:
    def work(comm: ThreadComm) -> list[int]:
        with using(comm):
            own = DataLoader(Own(0, 15), 5)
            loader = shoal.shard(own, batch="global", shards_itself=True)
            return [len(rows) for rows in lists(loader, 3)]

    assert run(2, work) == [[3, 3, 3], [2, 2, 2]]


def test_a_stream_goes_on_from_its_own_state() -> None:
    def work(comm: ThreadComm) -> list[list[int]]:
        with using(comm):
            before = shoal.shard(DataLoader(Own(0, 12), 2), shards_itself=True)
            taken = lists(before, 3)
            after = shoal.shard(DataLoader(Own(0, 12), 2), shards_itself=True)
            after.load_state_dict(before.state_dict())
            return taken + lists(after)

    assert [row for each in run(2, work)[1] for row in each] == list(range(12))


def test_a_state_of_other_ranks_is_refused() -> None:
    def work(comm: ThreadComm) -> dict[str, Any]:
        with using(comm):
            loader = shoal.shard(DataLoader(Own(0, 12), 2), shards_itself=True)
            lists(loader, 3)
            return loader.state_dict()

    state = run(2, work)[1]

    def other(comm: ThreadComm) -> None:
        with using(comm):
            loader = shoal.shard(DataLoader(Own(0, 12), 2), shards_itself=True)
            with pytest.raises(UsageError, match=r"rank 1 of 2(?s:.)*rank \d of 3"):
                loader.load_state_dict(state)

    run(3, other)


def test_a_stream_without_a_state_is_read_again() -> None:
    class Plain(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(12).tolist())

    def work(comm: ThreadComm) -> list[list[int]]:
        with using(comm):
            # torch draws as a pass begins: rank threads would share its generator
            before, after = (
                shoal.shard(DataLoader(Plain(), 2, generator=torch.Generator()), shards_itself=True)
                for _ in range(2)
            )
            taken = lists(before, 3)
            after.load_state_dict(before.state_dict())
            return taken + lists(after)

    for taken in run(2, work):
        assert sorted(row for each in taken for row in each) == list(range(12))


def test_an_empty_stream_is_said() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm):
            loader = shoal.shard(DataLoader(Own(0, 0), 2), shards_itself=True)
            with pytest.raises(UsageError, match=r"empty(?s:.)*rank \d, epoch 0"):
                lists(loader)

    run(2, work)


def test_rows_of_a_plain_dataset_do_not_shard_themselves() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm), pytest.raises(UsageError, match="leave shards_itself out"):
            shoal.shard(DataLoader(range(9)), shards_itself=True)

    run(2, work)
