"""Every habit of ordinary loops under every strategy: as in one process, to 1e-10."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from fuzz import judged
from habits import CLASSES, HABITS, OF_INPUTS, WIDTH, Net, Step
from one_process import built, cluster_of, difference, on_threads, sgd, state
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using

slow = pytest.mark.slow

ROWS = (3, 4)
WAYS: dict[str, dict[str, Any]] = {
    "replicate": {"pins": {"*": "replicate"}},
    "sliced": {"pins": {"*": "sliced"}},
    "factor": {"pins": {"*": "factor"}},
    "column": {"pins": dict.fromkeys("abc", "column")},
    "row": {"pins": dict.fromkeys("abc", "row")},
    "pair": {"pins": {"a": "column_pair", "b": "row_pair"}},
    "head": {"pins": {"c": "head"}},
    "embedding": {"pins": {"table": "embedding"}},
    "sync norm": {"pins": {"a": "column"}, "sync_batchnorm": True},
    "pipeline": {"pins": {"*": "pipeline"}},
}


def batch(step: int, of_ids: bool) -> tuple[Tensor, Tensor]:
    """The rows of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    rows = sum(ROWS)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(11, (rows, 2), generator=generator)
    return ids if of_ids else x, torch.randint(CLASSES, (rows,), generator=generator)


def habits_of(way: str) -> list[str]:
    return [name for name in HABITS if way != "embedding" or name not in OF_INPUTS]


def train(way: str, model: Any, loss_fn: Any, optimizer: Any, rank: int | None) -> Any:
    """Make a step by each habit, on a rank's rows or on all; return the state behind each."""
    states = {}
    for number, name in enumerate(habits_of(way)):
        x, y = batch(number, way == "embedding")
        if rank is not None:
            x, y = x.split(ROWS)[rank].clone(), y.split(ROWS)[rank].clone()
        try:
            HABITS[name](Step(model, loss_fn, optimizer, x, y))
        except Exception as error:
            error.add_note(f"habit: {name}")
            raise
        states[name] = state(model)
    return states


def on_ranks(way: str, model: Any, work: Any) -> Any:
    """What `work(rank, model, loss_fn, optimizer)` returns on each rank."""
    copies = [copy.deepcopy(model) for _ in ROWS]

    def on_rank(comm: ThreadComm) -> Any:
        own = copies[comm.rank]
        x, y = (tensor.split(ROWS)[comm.rank] for tensor in batch(0, way == "embedding"))
        with using(comm, cluster_of(len(ROWS))):
            own, loss_fn, optimizer = shoal.parallelize(
                own, F.cross_entropy, sgd(own.parameters()), sample=(x, y), **WAYS[way]
            )
            return work(comm.rank, own, loss_fn, optimizer)

    return on_threads(len(ROWS), on_rank)


@pytest.mark.parametrize("way", WAYS)
def test_habits_train_as_in_one_process(way: str) -> None:
    model = built(lambda: Net(of_ids=way == "embedding", with_norm=way == "sync norm"))
    alone = copy.deepcopy(model)
    with using(ThreadComm()):
        expected = train(way, alone, F.cross_entropy, sgd(alone.parameters()), None)

    def work(rank: int, own: Any, loss_fn: Any, optimizer: Any) -> Any:
        return train(way, own, loss_fn, optimizer, rank)

    for states in on_ranks(way, model, work):
        for name in expected:
            assert difference(expected[name], states[name]) <= 1e-10, name


class Doubles(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


TAKERS = {
    "a function": Doubles.apply,
    "a function's mean": lambda out: Doubles.apply(out).square().mean(),
    "a checkpoint": lambda out: checkpoint(torch.sum, out, use_reentrant=True),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("way", ["head", "pipeline"])
def test_no_gradient_is_lost_in_a_function_that_torch_gives_no_values(way: str, taker: str) -> None:
    def work(rank: int, own: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = (tensor.split(ROWS)[rank] for tensor in batch(0, False))
        output = own(x)
        (loss_fn(output, y) + TAKERS[taker](output).sum()).backward()

    with pytest.raises(UsageError, match=r"would lose its gradient\n.*use_reentrant=False"):
        on_ranks(way, built(Net), work)


def test_a_call_with_whole_weights_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, own: Any, loss_fn: Any, optimizer: Any) -> None:
        for step in range(3):
            x, y = (tensor.split(ROWS)[rank] for tensor in batch(step, False))
            HABITS["gradient of inputs"](Step(own, loss_fn, optimizer, x, y))

    on_ranks("pipeline", built(Net), work)
    said = [r.getMessage() for r in caplog.records if "whole weights" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("inputs take a gradient")


def test_gradients_of_inputs_on_one_rank_alone_are_told(way: str = "pipeline") -> None:
    def work(rank: int, own: Any, loss_fn: Any, optimizer: Any) -> None:
        x, y = (tensor.split(ROWS)[rank].clone() for tensor in batch(0, False))
        loss_fn(own(x.requires_grad_(rank == 0)), y).backward()

    with pytest.raises(
        RanksDiffer, match=r"inputs take a gradient: (True and False|False and True)"
    ):
        on_ranks(way, built(Net), work)


def test_running_statistics_of_calls_with_whole_weights() -> None:
    """Each rank normalises its own rows, and statistics are the mean, weighed by rows."""
    model = built(lambda: Net(with_norm=True))
    batches = [batch(step, False)[0] for step in range(2)]

    def work(rank: int, own: Any, loss_fn: Any, optimizer: Any) -> Any:
        x, more = (rows.split(ROWS)[rank].clone() for rows in batches)
        torch.autograd.grad(own(x.requires_grad_()).sum(), x)
        own(more).square().mean().backward()
        return state(own)

    apart = [copy.deepcopy(model) for _ in ROWS]
    for rank, own in enumerate(apart):
        for rows in batches:
            own(rows.split(ROWS)[rank])
    for got in on_ranks("pipeline", model, work):
        assert int(got["norm.num_batches_tracked"]) == 2
        for name in ("norm.running_mean", "norm.running_var"):
            values = [own.get_buffer(name) * rows for own, rows in zip(apart, ROWS, strict=True)]
            expected = sum(values) / sum(ROWS)
            assert torch.allclose(got[name], expected, rtol=0, atol=1e-12)


FEW = range(6)


@pytest.mark.parametrize("number", [*FEW, *(pytest.param(n, marks=slow) for n in range(6, 60))])
def test_loops_by_seed_with_what_the_planner_chooses(number: int) -> None:
    """More of them: tests/served/fuzz.py."""
    assert judged(number, Counter()) in ("same", "no script of one process")
