"""Workers' random numbers: no rank, pass or worker draws what another has drawn; resumed alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from shoal.data.deal import Deal
from shoal.data.sharded import shard_loader

pytestmark = pytest.mark.processes


def draws(index: int) -> torch.Tensor:
    """A row, and a number of each source."""
    drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
    return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Rows(Dataset[torch.Tensor]):
    """Augments rows; `own` seeds a generator of its own as numpy's users do."""

    rng: Any = None

    def __init__(self, num: int = 24) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> torch.Tensor:
        row = draws(index)
        if self.rng is not None:
            row[1] = float(self.rng.random())
        return row


class RowsAtOnce(Rows):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [draws(index) for index in indices]


def own_generator(worker: int) -> None:
    info: Any = get_worker_info()
    assert info.id == worker and isinstance(info.dataset, Rows) and info.seed != 0
    info.dataset.rng = np.random.default_rng(info.seed)


class Batches(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([draws(4 * index + row) for row in range(4)])


class Pairs(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(24).reshape(-1, 3).tolist())


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, split: bool) -> None:
        self.split = split

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info() if self.split else None
        rows = torch.randperm(24).tolist() if worker is None else range(24)
        yield from map(draws, rows[worker.id :: worker.num_workers] if worker else rows)


def augmented(rows: list[torch.Tensor]) -> torch.Tensor:
    """Draw while rows are collated, as mixup does."""
    return torch.stack([draws(int(row[0])) for row in rows])


W2: dict[str, Any] = {"num_workers": 2}
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "rows": lambda: DataLoader(Rows(), 3, shuffle=True, **W2),
    "persistent": lambda: DataLoader(Rows(), 3, persistent_workers=True, **W2),
    "at once": lambda: DataLoader(RowsAtOnce(), 3, **W2),
    "init": lambda: DataLoader(Rows(), 3, worker_init_fn=own_generator, **W2),
    "items": lambda: DataLoader(Batches(6), None, **W2),
    "lists": lambda: DataLoader(Rows(), batch_sampler=Pairs(), **W2),
    "split stream": lambda: DataLoader(Stream(split=True), 3, **W2),
    "stream, collated": lambda: DataLoader(Stream(split=False), 3, collate_fn=augmented, **W2),
}


def rank_of(kind: str, rank: int) -> Any:
    torch.manual_seed(0)  # as every script does on every rank
    np.random.seed(0)
    random.seed(0)
    return shard_loader(LOADERS[kind](), Deal(rank, 2), seed=0)


@pytest.mark.parametrize("kind", LOADERS)
def test_no_number_is_drawn_twice_on_two_ranks_in_two_epochs(kind: str) -> None:
    ranks = [rank_of(kind, rank) for rank in range(2)]
    drawn = torch.cat([batch for _ in range(2) for loader in ranks for batch in loader])
    assert sorted(drawn[:, 0].tolist()) == sorted(float(n) for n in [*range(24)] * 2)
    # workers that share a stream out read their first row alike, as they may order it by that
    alike = 2 if kind == "split stream" else 0
    for source in (1, 2, 3):
        assert len(drawn[:, source].unique()) == len(drawn) - alike == 48 - alike


@pytest.mark.parametrize("taken", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "init"])
def test_a_run_that_goes_on_draws_the_same(kind: str, taken: int) -> None:
    """Bit by bit, in the second epoch, and the next epoch too."""
    whole, before, after = (rank_of(kind, 1) for _ in range(3))
    list(whole), list(before)
    expected = [batch for _ in range(2) for batch in whole]
    batches = iter(before)
    first = [next(batches) for _ in range(taken)]
    after.load_state_dict(before.state_dict())
    torch.rand(5)
    rest = [batch for _ in range(2) for batch in after]
    assert all(map(torch.equal, [*first, *rest], expected))
    assert len(first) + len(rest) == len(expected)


def test_numbers_depend_on_the_loaders_seed_and_not_on_its_workers() -> None:
    def drawn(seed: int, num_workers: int) -> torch.Tensor:
        loader = DataLoader(Rows(), 3, num_workers=num_workers)
        return torch.cat(list(shard_loader(loader, Deal(0, 2), seed)))

    assert torch.equal(drawn(1, 1), drawn(1, 2))
    assert not torch.equal(drawn(1, 1), drawn(2, 1))


def test_what_the_script_draws_is_left_alone() -> None:
    loader = rank_of("rows", 0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches = iter(loader)  # torch draws one number as workers start
    next(batches)
    after = torch.rand(3)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.rand(3)) and not torch.equal(after, expected)
    assert loader.dataset.__class__ is Rows
