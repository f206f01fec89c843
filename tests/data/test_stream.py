"""Streams with workers: each row once, whether the dataset shares itself out among them or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from every_kind import Batches, Numbers, Ranks, flat
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.core.errors import UsageError

pytestmark = pytest.mark.processes


class Configured(IterableDataset[int]):
    """A worker_init_fn says which rows a worker has, as in torch's own documentation."""

    def __init__(self) -> None:
        self.rows = range(17)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


def configure(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rows = info.dataset.rows[worker :: info.num_workers]


class Seeded(IterableDataset[int]):
    """Shuffles by the seed that torch gives a worker, and with numpy."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        generator = torch.Generator().manual_seed(info.seed if info else 1)
        rows = torch.randperm(17, generator=generator).numpy()
        np.random.shuffle(rows)
        return iter(rows.tolist())


def loader(kind: str, persistent: bool = False) -> DataLoader[Any]:
    datasets: dict[str, tuple[IterableDataset[Any], Any]] = {
        "one": (Numbers(17), None),
        "shuffled": (Numbers(17, shuffle=True), None),
        "split": (Numbers(17, split=True), None),
        "configured": (Configured(), configure),
        "seeded": (Seeded(), None),
    }
    dataset, init = datasets[kind]
    return DataLoader(dataset, 2, num_workers=2, worker_init_fn=init, persistent_workers=persistent)


@pytest.mark.parametrize(
    ("kind", "size", "persistent"),
    [
        ("one", 2, False),
        ("shuffled", 2, True),
        ("split", 3, True),
        ("configured", 2, False),
        ("seeded", 2, False),
    ],
)
def test_each_row_comes_once_whoever_shares_it_out(kind: str, size: int, persistent: bool) -> None:
    ranks = Ranks(lambda: loader(kind, persistent), size)
    epochs = [ranks.steps() for _ in range(2)]
    for steps in epochs:
        assert sorted(flat(steps)) == list(range(17))
        assert all(rows for step in steps for rows in step)
    if kind in ("shuffled", "seeded"):
        assert epochs[0] != epochs[1]
    if kind == "one":
        assert flat(epochs[0]) == list(range(17)), "in the order that it has without workers"


def test_few_rows_a_worker_are_dealt_together() -> None:
    """7 rows on 2 workers, 3 ranks: a worker by itself has too few for them."""
    ranks = Ranks(lambda: DataLoader(Numbers(7, split=True), 2, num_workers=2), 3)
    steps = ranks.steps()
    assert sorted(flat(steps)) == list(range(7))
    assert all(rows for step in steps for rows in step)


@pytest.mark.parametrize("kind", ["one", "split"])
def test_a_position_holds_for_every_worker(kind: str) -> None:
    before, whole = Ranks(lambda: loader(kind), 2), Ranks(lambda: loader(kind), 1)
    taken = before.steps(2)
    after = Ranks(lambda: loader(kind), 1)
    after.load(before.state())
    rest = after.steps()
    assert sorted(flat(taken) + flat(rest)) == list(range(17))
    if kind == "one":
        assert flat(taken) + flat(rest) == flat(whole.steps())
        return
    with pytest.raises(UsageError, match=r"num_workers=2(?s:.)*do this"):
        Ranks(lambda: DataLoader(Numbers(17, split=True), 2), 1).load(before.state())


def test_batches_of_a_stream_by_workers() -> None:
    ranks = Ranks(lambda: DataLoader(Batches(), None, num_workers=2), 2)
    assert flat(ranks.steps()) == list(range(28))


@pytest.mark.quick
def test_a_stream_leaves_the_random_state_of_the_script_alone() -> None:
    def drawn(loader: Any) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.cat([torch.rand(1) for _ in zip(range(3), loader, strict=False)])

    shuffled = Ranks(lambda: DataLoader(Numbers(17, shuffle=True), 2), 1).loaders[0]
    assert torch.equal(drawn(shuffled), drawn(DataLoader(Numbers(17), 2)))


@pytest.mark.quick
def test_an_endless_stream_needs_no_end() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

    ranks = Ranks(lambda: DataLoader(Endless(), 2), 3)
    assert flat(ranks.steps(4)) == list(range(24))
    with pytest.raises(TypeError, match="length of a stream is not known"):
        len(ranks.loaders[0])


@pytest.mark.quick
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_ends_as_the_same_rows_would(drop_last: bool) -> None:
    for num in range(6 if drop_last else 3, 20):
        of_stream = Ranks(lambda n=num: DataLoader(Numbers(n), 2, drop_last=drop_last), 3)  # type: ignore[misc]
        of_rows = Ranks(lambda n=num: DataLoader(range(n), 2, drop_last=drop_last), 3)  # type: ignore[misc]
        assert of_stream.steps() == of_rows.steps()


@pytest.mark.quick
def test_too_few_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="2 rows, 3 ranks"):
        Ranks(lambda: DataLoader(Numbers(2), 2), 3).steps()


class Uneven(IterableDataset[torch.Tensor]):
    """A stream of batches, the last of which has one row."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(25).split(4)


@pytest.mark.quick
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_of_the_last_batches_is_collated_once(num_ranks: int) -> None:
    collated: list[int] = []

    def collate(batch: torch.Tensor) -> torch.Tensor:
        collated.append(int(batch[0]))
        return batch

    ranks = Ranks(lambda: DataLoader(Uneven(), None, collate_fn=collate), num_ranks)
    for loader in ranks.loaders:
        collated.clear()
        list(loader)
        assert len(collated) == len(set(collated)), collated


class Looked(list[torch.Tensor]):
    """Batches whose slices are counted, and draw a random number."""

    slices = 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            self.slices += 1
            torch.rand(1)
        return super().__getitem__(index)


@pytest.mark.quick
def test_the_steps_of_batches_are_counted_once_a_pass_and_draw_nothing() -> None:
    batches = Looked(torch.arange(25).split(4))
    loader = Ranks(lambda: batches, 2).loaders[0]
    batches.slices, before = 0, torch.get_rng_state()
    assert [len(loader) for _ in range(3)] == [3, 3, 3]
    assert batches.slices == 1
    assert torch.equal(before, torch.get_rng_state())
    assert len(list(loader)) == 3
    batches.append(torch.arange(4))
    assert len(loader) == 4
