"""A loader of every kind of source, over whole numbers as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from shoal.data.deal import Deal
from shoal.data.sharded import shard_loader


class Numbers(IterableDataset[int]):
    """A stream of rows; `split`: each worker has its own."""

    def __init__(self, num: int, split: bool = False, shuffle: bool = False) -> None:
        self.num, self.split, self.shuffle = num, split, shuffle

    def __iter__(self) -> Iterator[int]:
        rows = torch.randperm(self.num).tolist() if self.shuffle else range(self.num)
        worker = get_worker_info()
        yield from rows[worker.id :: worker.num_workers] if self.split and worker else rows


def batch(number: int) -> torch.Tensor:
    return torch.arange(number * 4, number * 4 + 4)


class Batches(IterableDataset[torch.Tensor]):
    """A stream of batches."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(batch, range(7))


class Made(Dataset[torch.Tensor]):
    """Batches by number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(index)

    def __len__(self) -> int:
        return 7


class Buckets(Sampler[list[int]]):
    """Batches of unlike size, in another order each epoch, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(26).tolist()
        for start, stop in ((0, 3), (3, 4), (4, 8), (8, 12), (12, 19), (19, 25), (25, 26)):
            yield rows[start:stop]


class Generated:
    """Makes batches, each time anew."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch(number) for number in torch.randperm(7).tolist())


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "rows": (lambda: DataLoader(range(29), 5), 29),
    "shuffled": (lambda: DataLoader(range(29), 5, shuffle=True), 29),
    "batch_sampler": (lambda: DataLoader(range(26), batch_sampler=Buckets()), 26),
    "items": (lambda: DataLoader(Made(), None, shuffle=True), 28),
    "stream": (lambda: DataLoader(Numbers(29), 5), 29),
    "shuffled stream": (lambda: DataLoader(Numbers(29, shuffle=True), 5), 29),
    "stream of batches": (lambda: DataLoader(Batches(), None), 28),
    "generated": (Generated, 28),
}


class Ranks:
    """A loader on every rank."""

    def __init__(self, make: Callable[[], Any], size: int, seed: int = 3, **options: Any) -> None:
        self.loaders = [shard_loader(make(), Deal(r, size, **options), seed) for r in range(size)]

    def steps(self, most: int | None = None) -> list[list[list[int]]]:
        """What ranks take, by step and rank."""
        passes = [iter(loader) for loader in self.loaders]
        taken = []
        while most is None or len(taken) < most:
            batches = [next(each, None) for each in passes]
            if None in batches:
                assert batches == [None] * len(batches), "as many steps on every rank"
                break
            taken.append([each.flatten().tolist() for each in batches if each is not None])
        return taken

    def state(self) -> dict[str, Any]:
        """The position, the same on every rank."""
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

    def load(self, state: dict[str, Any]) -> None:
        """Set it on every rank."""
        for loader in self.loaders:
            loader.load_state_dict(state)


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [row for step in steps for rows in step for row in rows]
