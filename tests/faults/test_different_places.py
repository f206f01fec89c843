"""Ranks that wait for one another at different places are told so, each place by its name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.core.facts import Cluster, Link, Topology
from shoal.front import parallel_ranks
from shoal.front.session_start import using

PINS = {
    "sliced": {"*": "sliced"},
    "replicate": {"*": "replicate"},
    "cut": {"0": "column_pair", "2": "row_pair", "4": "replicate"},
}


class Job:
    """A tiny model of one rank, and its steps."""

    def __init__(self, comm: ThreadComm, way: str) -> None:
        self.rank = comm.rank
        self.generator = torch.Generator().manual_seed(comm.rank)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        self.model, self.loss_fn, self.optimizer = shoal.parallelize(
            model, nn.CrossEntropyLoss(), optimizer, sample=self.batch(), pins=PINS[way]
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 6, generator=self.generator)
        return x, torch.randint(0, 3, (4,), generator=self.generator)

    def forward(self) -> Tensor:
        x, y = self.batch()
        loss: Tensor = self.loss_fn(self.model(x), y)
        return loss

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.forward().backward()
            self.optimizer.step()


def told(work: Callable[[Job], object], way: str, ranks: int = 2) -> RanksDiffer:
    """What `ranks` are told that do this: no rank waits for the 30 s of a lost exchange."""
    heard: dict[int, Exception] = {}
    began: list[float] = []

    def of_rank(comm: ThreadComm) -> None:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            job = Job(comm, way)
            job.step(2)
            began.append(time.monotonic())
            try:
                work(job)
            except Exception as error:
                heard[comm.rank] = error
                raise

    with pytest.raises(RanksDiffer) as caught:
        run(ranks, of_rank, timeout_s=30)
    assert time.monotonic() - min(began) < 20
    assert len(heard) == ranks
    assert {type(error) for error in heard.values()} == {RanksDiffer}
    return caught.value


def rank_1_clips_by_shoals_norm(job: Job) -> None:
    job.step()
    job.forward().backward()
    if job.rank == 1:
        job.optimizer.clip_grad_norm_(1.0)
    job.optimizer.step()
    job.step(2)


def rank_1_reads_a_gradient(job: Job) -> None:
    job.optimizer.zero_grad()
    job.forward().backward()
    if job.rank == 1:
        print(job.model[0].weight.grad)
    job.optimizer.step()
    job.step(2)


def rank_0_parallelizes_another(job: Job) -> None:
    if job.rank == 0:
        other = nn.Linear(6, 3)
        shoal.parallelize(
            other, job.loss_fn, torch.optim.SGD(other.parameters(), 0.1), sample=job.batch()
        )
    job.step(3)


def rank_0_validates_with_gradients(job: Job) -> None:
    if job.rank == 0:
        job.model(torch.randn(64, 6))
    job.step(2)


def rank_1_skips_a_backward(job: Job) -> None:
    loss = job.forward()
    if job.rank == 0:
        loss.backward()
    job.step(2)


def rank_0_gives_the_model_back(job: Job) -> None:
    if job.rank == 0:
        shoal.unparallelize(job.model)
    job.step(3)


@pytest.mark.parametrize(
    ("way", "work", "said"),
    [
        ("sliced", rank_1_clips_by_shoals_norm, r"rank 1: .*clip_grad_norm_\(\)"),
        ("cut", rank_1_clips_by_shoals_norm, r"clip_grad_norm_"),
        ("sliced", rank_1_reads_a_gradient, r"rank 1: .*read gradients \(.grad\)"),
        ("cut", rank_1_reads_a_gradient, r"reading of 0.weight \(state_dict, print, grad\)"),
        ("replicate", rank_0_parallelizes_another, r"rank 0: parallelize: "),
        ("sliced", rank_0_parallelizes_another, r"rank 0: parallelize: "),
        ("cut", rank_0_parallelizes_another, r"rank 0: parallelize: "),
        ("replicate", rank_0_gives_the_model_back, r"rank 0: unparallelize"),
        ("sliced", rank_0_gives_the_model_back, r"rank 0: unparallelize"),
        ("cut", rank_0_gives_the_model_back, r"rank 0: unparallelize"),
        ("cut", rank_0_validates_with_gradients, r"rank 0"),
        ("cut", rank_1_skips_a_backward, r"rank 1: training, call of layer|backward"),
    ],
)
def test_each_place_is_named(way: str, work: Callable[[Job], Any], said: str) -> None:
    error = told(work, way)
    assert re.search(said, error.what), error
    assert error.do


def test_a_search_that_lasts_while_ranks_compare_weights_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 searches, the others wait for its plan, and have not come to the weights yet."""

    def delayed(call: Callable[..., Any], wanted: Callable[[Any], bool]) -> Callable[..., Any]:
        def late(*given: Any) -> Any:
            if wanted(given):
                time.sleep(2.0)  # some looks of every rank
            return call(*given)

        return late

    monkeypatch.setattr(parallel_ranks, "chosen", delayed(parallel_ranks.chosen, lambda _: True))
    compared = delayed(parallel_ranks.of_first, lambda given: given[1].rank > 0)
    monkeypatch.setattr(parallel_ranks, "of_first", compared)

    def of_rank(comm: ThreadComm) -> None:
        with using(comm, Cluster(Topology(("a", "b", "c")), Link(1e-4, 1e8), 1.0)):
            Job(comm, "replicate").step(2)

    run(3, of_rank, timeout_s=30)
