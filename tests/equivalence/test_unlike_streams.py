"""A stream that all ranks read and that is unlike on one of them: said before a row is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from one_process import cluster_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.front.session_start import using

Rows = Callable[[int], Sequence[int]]
LENGTH = "the length of the stream that each rank reads"


class Numbers(IterableDataset[Any]):
    """A row for each number, which is its target."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return ((torch.full((3,), row / 20.0), float(row)) for row in self.rows)


class Measured(Numbers):
    """Numbers that know how many they are."""

    def __len__(self) -> int:
        return len(self.rows)


def trained(rows: Rows, way: str, *, looks: int | None = None, workers: int = 0) -> list[Any]:
    """Targets that each rank has trained on in two epochs, and what stopped it."""

    def work(comm: ThreadComm) -> Any:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with using(comm, cluster_of(comm.size)):
            loader = shoal.shard(
                DataLoader(Numbers(rows(comm.rank)), batch_size=2, num_workers=workers)
            )
            x, y = next(iter(loader))
            shoal.parallelize(model, squares, optimizer, sample=(x, y), pins={"*": way})
            seen = list[float]()
            try:
                for _ in range(2):
                    for number, (x, y) in enumerate(loader):
                        if comm.rank == looks and number in (0, 2):
                            list(loader)
                        squares(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        seen += y.tolist()
                model(x)
            except RanksDiffer as error:
                return seen, str(error)
        return seen, ""

    return run(2, work, timeout_s=20)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - target).square().mean()


UNLIKE: dict[str, tuple[Rows, str]] = {
    "shorter": (
        lambda rank: range(13 if rank else 20),
        rf"{LENGTH}(?s:.)*rank 1: its stream ends after 13 (?s:.)*goes on after 12",
    ),
    "shorter by a step": (
        lambda rank: range(12 if rank else 20),
        rf"{LENGTH}(?s:.)*rank 1: its stream ends after 12 (?s:.)*goes on after 12",
    ),
    "by a row": (lambda rank: range(20 - rank), rf"{LENGTH}(?s:.)*after 19 (?s:.)*after 20"),
    "longer": (lambda rank: range(20 if rank else 13), rf"{LENGTH}(?s:.)*after 12(?s:.)*after 13"),
    "short": (lambda rank: range(20 if rank else 3), rf"{LENGTH}(?s:.)*after 4(?s:.)*after 3"),
    "one row left out": (
        lambda rank: [row for row in range(21) if not (rank and row == 5)],
        r"a row of the stream that each rank reads(?s:.)*digest(?s:.)*the same files",
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", UNLIKE)
def test_a_stream_that_is_unlike_on_one_rank(case: str) -> None:
    rows, says = UNLIKE[case]
    (first, error), (second, _) = trained(rows, "replicate")
    with pytest.raises(RanksDiffer, match=says):
        raise RanksDiffer(error)
    both = first + second
    assert len(both) == len(set(both)), "no row is trained on twice"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sliced", "factor", "row"])
def test_other_plans_hear_of_it(way: str) -> None:
    (_, error), _ = trained(UNLIKE["shorter"][0], way)
    assert LENGTH in error


@pytest.mark.parametrize("looks", [None, 1])
def test_a_stream_that_is_the_same_is_nothing(looks: int | None) -> None:
    ranks = trained(lambda rank: range(13), "replicate", looks=looks)
    assert sorted(row for seen, _ in ranks for row in seen) == sorted([*range(13)] * 2)
    assert not any(error for _, error in ranks)


@pytest.mark.slow
@pytest.mark.processes
def test_workers_tell_it_too() -> None:
    (_, error), _ = trained(UNLIKE["shorter"][0], "replicate", workers=2)
    assert LENGTH in error
    ranks = trained(lambda rank: range(13), "replicate", workers=2)
    assert not any(error for _, error in ranks)


def test_lengths_that_datasets_name_are_compared_at_once() -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm, cluster_of(comm.size)):
            dataset = Measured(range(20 - 7 * comm.rank))
            with pytest.raises(RanksDiffer, match=r"a stream of 13,(?s:.)*a stream of 20,"):
                shoal.shard(DataLoader(dataset, batch_size=2))
            with pytest.raises(RanksDiffer, match=r"a stream of 1,(?s:.)*a stream of 2,"):
                shoal.shard([torch.ones(4)] * (2 - comm.rank), batch="global")

    run(2, work, timeout_s=20)
