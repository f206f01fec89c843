"""Ranks that call the model unlike often before one backward train as under data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using


def rows(rank: int, step: int, call: int, number: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + call)
    return torch.randn(number, 4, generator=generator, dtype=torch.float64)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same on every rank, though these are threads, which share one generator."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def loss(model: nn.Module, rank: int, step: int, calls: int) -> Tensor:
    """An episode: a call a step of it."""
    return torch.stack([model(rows(rank, step, c)).square().mean() for c in range(calls)]).sum()


def backwards(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    step: int,
    calls: int,
    accumulate: bool,
) -> None:
    if not accumulate:
        loss(model, rank, step, calls).backward()
        return
    for call in range(calls):
        each = model(rows(rank, step, call)).square().mean()
        if call < calls - 1:
            with optimizer.accumulate():  # type: ignore[attr-defined]
                each.backward()
        else:
            each.backward()


def by_shoal(lengths: Sequence[Sequence[int]], way: str, accumulate: bool) -> list[Tensor]:
    """The parameters after steps in which each rank makes so many calls."""

    def work(comm: ThreadComm) -> list[Tensor]:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            model, optimizer = made()
            sample = rows(comm.rank, 99, 0), torch.zeros(1)
            shoal.parallelize(
                model,
                lambda output, _: output.square().mean(),
                optimizer,
                sample=sample,
                pins={"*": way},
            )
            for step, calls in enumerate(lengths):
                optimizer.zero_grad()
                backwards(model, optimizer, comm.rank, step, calls[comm.rank], accumulate)
                optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

    ranks = run(len(lengths[0]), work, timeout_s=20)
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))
    return ranks[0]


def by_one_process(lengths: Sequence[Sequence[int]]) -> list[Tensor]:
    """The same, as DistributedDataParallel would: gradients are the mean of the ranks'."""
    model, optimizer = made()
    for step, calls in enumerate(lengths):
        optimizer.zero_grad()
        for rank, number in enumerate(calls):
            (loss(model, rank, step, number) / len(calls)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor"])
@pytest.mark.parametrize(
    "lengths",
    [
        [(3, 5), (3, 5)],
        [(1, 1), (1, 3), (2, 1), (2, 2)],  # single calls, which ask for nothing, among others
        [(4, 2, 1), (1, 1, 1), (1, 2, 3)],
    ],
    ids=["episodes", "one or several", "three ranks"],
)
def test_episodes_of_unlike_length(lengths: Sequence[Sequence[int]], way: str) -> None:
    found = by_shoal(lengths, way, accumulate=False)
    for got, expected in zip(found, by_one_process(lengths), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_micro_steps_of_unlike_number() -> None:
    lengths = [(1, 3), (2, 2), (4, 1)]
    found = by_shoal(lengths, "replicate", accumulate=True)
    for got, expected in zip(found, by_one_process(lengths), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_backward_that_one_rank_leaves_out_is_a_round_with_a_call_more() -> None:
    """As where a loss was NaN: the call's gradient is nobody's, and the ranks go on."""

    def work(comm: ThreadComm) -> None:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            model, optimizer = made()
            sample = rows(comm.rank, 99, 0), torch.zeros(1)
            shoal.parallelize(
                model,
                lambda output, _: output.square().mean(),
                optimizer,
                sample=sample,
                strategies=["replicate"],
            )
            for step in range(4 + comm.rank):
                optimizer.zero_grad()
                each = loss(model, comm.rank, step, 1)
                if (comm.rank, step) != (1, 1):
                    each.backward()
                    optimizer.step()

    run(2, work, timeout_s=20)
