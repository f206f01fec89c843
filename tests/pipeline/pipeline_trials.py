"""A trial: a small model in a pipeline of thread ranks, and the errors of all ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

PINS = {"*": "pipeline"}
TIED = {"first": 0, "blocks.0": 1, "blocks.1": 1, "blocks.2": 2, "blocks.3": 2, "head": 0}
WIDTH, CLASSES, SOON_S = 6, 3, 10.0
Loop = Callable[..., Any]


class Blocks(nn.Module):
    """A residual network of linear layers."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.first(x)))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def squares(output: Any, y: Tensor) -> Tensor:
    return ((output - y) ** 2).mean()


def batch(rank: int, step: int = 0, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, CLASSES, generator=generator, dtype=torch.float64)


def batch_of_all(ranks: int, step: int = 0, rows: Sequence[int] | None = None) -> list[Tensor]:
    rows = [4] * ranks if rows is None else rows
    batches = [batch(rank, step, rows[rank]) for rank in range(ranks)]
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def a_step(model: Any, loss_fn: Any, x: Tensor, y: Tensor) -> None:
    loss_fn(model(x), y).backward()


def piped(
    model: nn.Module,
    loop: Loop,
    ranks: int = 2,
    loss_fn: Any = squares,
    wrapped: Callable[[ThreadComm], Comm] = lambda comm: comm,
    **options: Any,
) -> list[Any]:
    """Return what `loop(rank, model, loss_fn, optimizer)` returns on each rank."""
    model = model.double()  # made on the main thread, because ranks share a seed

    def work(comm: ThreadComm) -> Any:
        hosts = tuple(f"h{rank}" for rank in range(ranks))
        with using(wrapped(comm), Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            own, loss = copy.deepcopy((model, loss_fn))
            optimizer = SGD(own.parameters(), lr=0.1, momentum=0.9)
            own, loss, _ = shoal.parallelize(
                own, loss, optimizer, **{"pins": PINS, "sample": batch(comm.rank), **options}
            )
            return loop(comm.rank, own, loss, optimizer)

    return run(ranks, work, timeout_s=30)


def assert_as_one_process(
    model: nn.Module,
    step: Callable[..., None] = a_step,
    ranks: int = 2,
    loss_fn: Any = squares,
    rows: Sequence[Sequence[int]] | None = None,
    steps: int = 3,
    **options: Any,
) -> None:
    """Train in a pipeline and in one process, and compare all parameters and buffers."""
    model = model.double()
    alone = copy.deepcopy(model)
    own_loss, optimizer = copy.deepcopy(loss_fn), SGD(alone.parameters(), lr=0.1, momentum=0.9)
    rows = [[4] * ranks] * steps if rows is None else rows
    for number, its_rows in enumerate(rows):
        optimizer.zero_grad()
        step(alone, own_loss, *batch_of_all(ranks, number, its_rows))
        optimizer.step()

    def loop(rank: int, own: nn.Module, loss: Any, its_optimizer: Any) -> Mapping[str, Tensor]:
        for number, its_rows in enumerate(rows):
            its_optimizer.zero_grad()
            step(own, loss, *batch(rank, number, its_rows[rank]))
            its_optimizer.step()
        return own.state_dict()

    for state in piped(model, loop, ranks, loss_fn, **options):
        for name, value in alone.state_dict().items():
            assert torch.allclose(state[name], value, rtol=0, atol=1e-10), name


def errors_of(model: nn.Module, loop: Loop, ranks: int = 2, **options: Any) -> dict[int, Exception]:
    """Return the error of each rank, all of which fail."""
    errors: dict[int, Exception] = {}

    def noted(rank: int, *args: Any) -> None:
        try:
            loop(rank, *args)
        except Exception as error:
            errors[rank] = error
            raise

    with pytest.raises(Exception):  # noqa: B017  # of the rank that fails first
        piped(model, noted, ranks, **options)
    names = [thread.name for thread in threading.enumerate()]
    assert sorted(errors) == list(range(ranks)), names
    return errors


def pins_of(ranks: Mapping[str, int]) -> dict[str, str]:
    return {layer: f"pipeline:{rank}" for layer, rank in ranks.items()}
