"""A stream of one rank's own rows, read in workers or not, which continues at a position.

    part     the rows of one worker; all rows without workers
    piece    a batch, its part of the stream, and the dataset's own state after it

A dataset with `state_dict` and `load_state_dict` continues from its own state. Any other dataset is
read from its start to the position. That is exact if its rows depend only on random numbers: torch,
random and numpy are seeded for each batch. The seed is made of the loader's seed, the epoch, the
rank, the part and the number of the batch. Guarded by tests/data/test_own_streams.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, final

from torch.utils.data._utils import worker as torch_worker

from shoal.core.random_state import mix_seeds
from shoal.data.parts import digest_of
from shoal.data.pass_listener import ToldDataset, next_part
from shoal.data.random_numbers import drawing_at, seed_worker
from shoal.data.worker_info import WorkerInfo, begin

_START = -1  # number that stands for the draws as a part begins
_LOOKED_AT = 256  # elements of a row in the digest that recognises a stream


class StreamPiece(NamedTuple):
    """A batch from a worker to the main process: a plain tuple, so that tensors can be pinned."""

    part: int
    parts: int
    digest: int  # digest of the first row of the batch
    before: int  # digest of the batch before, if that was skipped
    state: bytes | None  # state of the dataset after the batch; None if it has none
    batch: Any


def has_state(dataset: Any) -> bool:
    """Return whether a dataset can save its position and continue from it."""
    return all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict"))


@final
class OwnStream(ToldDataset[StreamPiece]):
    """One rank's own stream as batches, for torch's workers.

    Args:
        dataset: the user's dataset.
        batch_size: rows of a batch; None if the dataset gives batches.
        drop_last: whether to leave out a last batch that is not whole.
        collate: makes a batch of rows.
        rank: this rank.
        draws: whether the stream draws from seeds of its own. If not, it draws as the script does.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        drop_last: bool,
        collate: Callable[[Any], Any],
        rank: int,
        draws: bool = True,
    ) -> None:
        super().__init__(dataset)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._collate, self._rank, self._draws = collate, rank, draws
        self.states: Sequence[Any] = ()  # states of the parts as the pass begins

    def part_of(self, worker: int, workers: int) -> int:
        """Return the part that a worker reads."""
        _, _, start = self.told()
        return (worker + next_part(start)) % workers

    def seed_of(self, part: int, number: int = _START) -> int:
        """Return the seed of one batch of a part."""
        seed, epoch, _ = self.told()
        return mix_seeds(seed, epoch, self._rank, part, number)

    def __iter__(self) -> Iterator[StreamPiece]:
        info: Any = torch_worker._worker_info
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        _, epoch, start = self.told()
        taken = start[part] if start else 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        read = 0
        if taken and self.states and self.states[part] is not None:
            self.dataset.load_state_dict(self.states[part])
            read = taken
        with self._drawing(part, _START):
            rows = iter(self.dataset)
        before = 0
        for number in count(read):
            with self._drawing(part, number):
                if not (units := self._units(rows)):
                    return
                digest = digest_of(units[0], _LOOKED_AT)
                if number < taken:
                    before = digest
                    continue
                batch = self._collate(units[0] if self._batch_size is None else units)
            yield StreamPiece(part, parts, digest, before, self._state(), batch)
            before = 0

    def _units(self, rows: Iterator[Any]) -> list[Any]:
        """Read the rows of a batch, or one batch; return an empty list at the end."""
        whole = self._batch_size or 1
        units = list(islice(rows, whole))
        return [] if self._drop_last and len(units) < whole else units

    def _drawing(self, part: int, number: int) -> AbstractContextManager[None]:
        if not self._draws:
            return nullcontext()
        if torch_worker._worker_info is None:
            return drawing_at(self.seed_of(part, number))
        seed_worker(self.seed_of(part, number))
        return nullcontext()

    def _state(self) -> bytes | None:
        """Return the dataset's present state; None if it has none, or one that cannot be copied."""
        if not has_state(self.dataset):
            return None
        try:
            return pickle.dumps(self.dataset.state_dict())
        except Exception:  # the dataset's own code may raise anything
            return None


@final
class StreamWorker(WorkerInfo):
    """Torch's record of a worker for a stream of this rank, with the part's number as its own."""

    def __init__(self, info: Any, stream: OwnStream) -> None:
        super().__init__(info, stream.dataset)
        self._stream = stream

    @property
    def id(self) -> int:
        """Number of the part."""
        return self._stream.part_of(self._info.id, self._info.num_workers)

    @property
    def seed(self) -> int:
        """Seed of the part's start, in this epoch and on this rank."""
        return self._stream.seed_of(self.id)


@final
@dataclass(frozen=True)
class BeginStream:
    """The first call in a worker: seed it, then call the user's `worker_init_fn`."""

    init: Callable[[int], object] | None

    def __call__(self, worker: int) -> None:
        """Prepare the worker."""
        info: Any = torch_worker._worker_info
        seen = StreamWorker(info, info.dataset)
        seed_worker(seen.seed)
        begin(seen, seen.id, self.init)
