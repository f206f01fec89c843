"""Workers that read rows by number: each batch begins with random numbers of its own.

    main process   (seed, rows), (seed, rows), …       the seed is made of the loader's seed, the
    worker         seeds torch, numpy and random,      pass, this rank and the position
                   and reads the rows

So ranks and passes all augment differently. A run that goes on in the middle of an epoch draws the
same numbers. Before `worker_init_fn`, as a worker starts, the seed is made of the worker's number.
Guarded by tests/data/test_worker_draws.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils import worker as torch_worker

from shoal.core.random_state import mix_seeds
from shoal.data.random_numbers import seed_worker
from shoal.data.rows import Known, OwnItems, OwnRows
from shoal.data.worker_info import WorkerInfo, begin

Loader = TypeVar("Loader", bound=DataLoader[Any])


@final
class WorkerRows:
    """A dataset as a worker sees it. Each request for rows comes with a seed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, asked: tuple[int, Any]) -> Any:
        """Read one item after seeding."""
        seed, key = asked
        seed_worker(seed)
        return self.dataset[key]

    def __getitems__(self, asked: tuple[int, list[Any]]) -> Any:
        """Read the rows of a batch after seeding, as torch's own workers do."""
        seed, keys = asked
        seed_worker(seed)
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(keys)
        return [self.dataset[key] for key in keys]


@final
class SeededKeys(Sampler[Any]):
    """Rows or items of this rank, each batch with a seed."""

    def __init__(self, keys: OwnRows | OwnItems) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self._keys.seeded()

    def __len__(self) -> int:
        return len(self._keys)


@final
class SeededInfo(WorkerInfo):
    """Torch's record of a worker, with this rank's seed."""

    def __init__(self, info: Any, dataset: Any, seed: int) -> None:
        super().__init__(info, dataset)
        self.seed = seed


@final
@dataclass(frozen=True)
class SeedWorker:
    """The first call in a worker: seed it, then call the user's `worker_init_fn`."""

    seeds: tuple[int, ...]  # loader's seed, epoch, rank
    init: Callable[[int], object] | None

    def __call__(self, worker: int) -> None:
        """Prepare the worker."""
        info: Any = torch_worker._worker_info
        seed = mix_seeds(*self.seeds, worker, -1)
        seed_worker(seed)
        begin(SeededInfo(info, info.dataset.dataset, seed), worker, self.init)


def seeded(loader: Loader, source: Known[Any]) -> Loader:
    """Return a copy of the loader that its workers see."""
    seen = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    seeds = source.seed, source.epoch, source.rank
    vars(seen)["dataset"] = WorkerRows(loader.dataset)
    vars(seen)[name] = SeededKeys(getattr(loader, name))
    vars(seen)["worker_init_fn"] = SeedWorker(seeds, loader.worker_init_fn)
    return seen
