"""Trains tables whose rows are at servers, and compares with one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from one_process import (
    Batch,
    Loop,
    State,
    Training,
    assert_same_bits,
    cluster_of,
    difference,
    integers,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.servers.servers import serve

ROWS, WIDTH = 23, 5
PINS = {"table": "server_rows", "head": "replicate"}


class Words(nn.Module):
    """A table whose mean over some ids goes into a head."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=padding)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1))


class Twice(Words):
    """The same table, called twice."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head((self.table(ids) * self.table(ids.flip(1) // 2)).mean(1))


class Rarely(Words):
    """A table that is called with those rows alone whose first id is even."""

    def forward(self, ids: Tensor) -> Tensor:
        found = (ids / ROWS).sum(1, keepdim=True).double().repeat(1, WIDTH)
        even = ids[:, 0] % 2 == 0
        if even.any():
            found[even] = self.table(ids[even]).mean(1)
        return self.head(found)


def batches(steps: int = 5) -> list[Batch]:
    """Ids of which some come twice and most not at all, and classes."""
    return [
        (integers(ROWS, 12, 4, seed=s) // (1 + s % 2), integers(3, 12, seed=s))
        for s in range(steps)
    ]


def together(
    model: nn.Module,
    loop: Callable[..., Any],
    workers: int = 3,
    servers: int = 2,
    *,
    optimizer: Callable[..., Optimizer] = sgd,
    uneven: bool = False,
    given: list[Batch] | None = None,
    **how: Any,
) -> tuple[list[State], list[Any], list[list[Counter[int]]]]:
    """States of workers, what their loops returned, and what servers observed."""
    copies, cluster = [copy.deepcopy(model) for _ in range(workers)], cluster_of(workers, servers)
    how = {"pins": PINS} | how

    def work(comm: ThreadComm) -> Any:
        if comm.rank >= workers:
            return serve(comm)
        mine, own = (
            copies[comm.rank],
            [rows_of(batch, comm.rank, workers, uneven) for batch in given or batches()],
        )
        with using(comm, cluster) as session:
            its = optimizer(mine.parameters())
            _, loss_fn, _ = shoal.parallelize(mine, F.cross_entropy, its, sample=own[0], **how)
            assert session.attached[mine].plan.choice("table").strategy == "server_rows"
            return loop(mine, loss_fn, its, own), state(mine)

    hosts = cluster.topology.hosts + cluster.servers
    results = run(workers + servers, work, timeout_s=20, hosts=hosts, servers=servers)
    return [r[1] for r in results[:workers]], [r[0] for r in results[:workers]], results[workers:]


def assert_same(model: nn.Module, loop: Loop = plain, **how: Any) -> None:
    """Workers get what one process gets, with the same bits."""
    expected = Training(
        model=model,
        batches=how.get("given") or batches(),
        optimizer=how.get("optimizer", sgd),
        loop=loop,
    ).alone()
    got, _, _ = together(model, loop, **how)
    assert_same_bits(got)
    assert difference(state(model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0]) <= 1e-10
