"""Streams that shard themselves go on in mid-epoch to the same batches, with workers too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import built
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

NUM = 23  # rows of a rank


class Shards(IterableDataset[torch.Tensor]):
    """As webdataset does: rows of a rank, split among its workers, shuffled and augmented."""

    def __init__(self, rank: int, num: int = NUM) -> None:
        self.rank, self.num = rank, num

    def order(self) -> list[int]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = range(part, self.num, parts)
        return [rows[i] for i in torch.randperm(len(rows)).tolist()]

    def row(self, number: int) -> torch.Tensor:
        return torch.tensor([100.0 * self.rank + number, torch.rand(()).item()])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.row, self.order())


class Stateful(Shards):
    """Knows where it is, and counts the rows that were read."""

    def __init__(self, rank: int, num: int = NUM) -> None:
        super().__init__(rank, num)
        self.taken, self.begins, self.read = 0, 0, 0

    def order(self) -> list[int]:
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        return list(range(part, self.num, parts))

    def __iter__(self) -> Iterator[torch.Tensor]:
        begin, self.begins = self.begins, 0
        rows = self.order()
        for place in range(begin, len(rows)):
            self.taken, self.read = place + 1, self.read + 1
            yield self.row(rows[place])

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "t": torch.tensor([self.taken])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = int(state["t"])


def on_ranks(work: Any, size: int = 2) -> list[Any]:
    def on_rank(comm: ThreadComm) -> Any:
        hosts = tuple(f"h{rank}" for rank in range(size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            return work(comm.rank)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rank . leaves rows")
        return run(size, on_rank, timeout_s=60)


def made(kind: type[Shards], rank: int, **options: Any) -> Any:
    # torch's own draw as a pass begins: ranks are threads, and would draw from one generator
    loader = DataLoader(kind(rank), 2, generator=torch.Generator(), **options)
    return shoal.shard(loader, shards_itself=True)


QUICK = pytest.mark.quick
CASES = [
    ("plain", Shards, {}),
    ("stateful", Stateful, {}),
    ("drop_last", Shards, {"drop_last": True}),
    ("workers", Shards, {"num_workers": 2}),
    ("stateful workers", Stateful, {"num_workers": 2, "persistent_workers": True}),
    ("three workers", Stateful, {"num_workers": 3, "prefetch_factor": 3}),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=name, marks=[] if "num_workers" in options else QUICK)
        for name, kind, options in CASES
    ],
)
def test_a_position_goes_on_to_the_same_batches(kind: Any, options: dict[str, Any]) -> None:
    """Wherever it was in the second epoch, also of a run that had gone on before."""

    def work(rank: int) -> None:
        whole = made(kind, rank, **options)
        list(whole)
        expected = [list(whole) for _ in range(2)]
        for taken in (1, 2, 3, 5, len(expected[0])) if not options else (1, 4):
            before, after, last = (made(kind, rank, **options) for _ in range(3))
            before.set_epoch(1)
            batches = iter(before)
            got = [next(batches) for _ in range(taken)]
            after.load_state_dict(before.state_dict())
            if taken < 5:
                again = iter(after)
                got.append(next(again))
                last.load_state_dict(after.state_dict())
                after = last
            got += list(after)
            assert len(got) == len(expected[0])
            assert all(map(torch.equal, got, expected[0])), f"behind {taken} batches"
            assert all(map(torch.equal, list(after), expected[1])), "the next epoch"

    on_ranks(work)


def test_ranks_draw_unlike_numbers() -> None:
    def work(rank: int) -> list[float]:
        loader = made(Shards, rank)
        return [float(row) for _ in range(2) for batch in loader for row in batch[:, 1]]

    drawn = [number for numbers in on_ranks(work) for number in numbers]
    assert len(set(drawn)) == len(drawn) == 4 * NUM


def test_a_dataset_with_a_state_reads_nothing_again() -> None:
    def work(rank: int) -> int:
        before, after = made(Stateful, rank), made(Stateful, rank)
        batches = iter(before)
        for _ in range(8):
            next(batches)
        after.load_state_dict(before.state_dict())
        list(after)
        return int(after.dataset.read)

    assert on_ranks(work) == [NUM - 16] * 2


def test_a_stream_that_is_another_goes_on_and_says_so() -> None:
    class Other(Shards):
        changed = False

        def row(self, number: int) -> torch.Tensor:
            return super().row(number) + (1000 if self.changed else 0)

    def work(rank: int) -> int:
        before, after = made(Other, rank), made(Other, rank)
        batches = iter(before)
        for _ in range(3):
            next(batches)
        after.load_state_dict(before.state_dict())
        after.dataset.dataset.changed = True
        return len(list(after))

    with pytest.warns(UserWarning, match=r"another one than when its position was saved"):
        assert on_ranks(work) == [9, 9]


def test_other_workers_are_refused() -> None:
    def work(rank: int) -> None:
        before, after = made(Shards, rank), made(Shards, rank, num_workers=2)
        next(iter(before))
        with pytest.raises(UsageError, match=r"num_workers=2(?s:.)*num_workers=1(?s:.)*set_epoch"):
            after.load_state_dict(before.state_dict())

    on_ranks(work)


@pytest.mark.parametrize(
    "workers", [0, pytest.param(2, marks=[pytest.mark.processes, pytest.mark.slow])]
)
def test_a_run_on_its_own_streams_is_saved_in_time_and_goes_on(
    tmp_path: Path, workers: int
) -> None:
    """`Checkpoints`, due at every step: stopped in mid-epoch, it ends with the same weights."""

    def work(rank: int, stop: int | None, folder: Path) -> torch.Tensor:
        model = built(lambda: nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        sample = torch.full((3, 2), 1.0 + rank).double(), torch.ones(3, 1).double()
        _, loss_fn, _ = shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)
        loader = made(Shards, rank, num_workers=workers)
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        with shoal.Checkpoints(folder, every_s=1e-6, **parts) as saved:
            saved.resume()
            shoal.gather(torch.ones(1))  # ranks are threads, which share the random state
            for _ in range(loader.epoch, 3):
                for batch in loader:
                    rows = batch.double()
                    optimizer.zero_grad()
                    loss_fn(model(rows), rows[:, 1:]).backward()
                    optimizer.step()
                    if saved.steps + 1 == stop:
                        saved.step()
                        saved.save()
                        return model.weight.detach().clone()
                    saved.step()
        return model.weight.detach().clone()

    whole = on_ranks(lambda rank: work(rank, None, tmp_path / "whole"))
    on_ranks(lambda rank: work(rank, 17, tmp_path / "parts"))
    parts = on_ranks(lambda rank: work(rank, None, tmp_path / "parts"))
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)
