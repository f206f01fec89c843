"""Trains a model whose end runs on hosts of its own, and compares it with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
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
    features,
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

WIDTH, HIDDEN, CLASSES = 6, 8, 5
PINS = {"body.*": "replicate", "tail.*": "stage"}


class Net(nn.Module):
    """A body, and a tail of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.tail = nn.Sequential(
            nn.ReLU(),
            nn.Linear(WIDTH, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


def together(
    model: nn.Module,
    loop: Callable[..., Any] = plain,
    workers: int = 3,
    tail: int = 1,
    *,
    optimizer: Callable[..., Optimizer] = sgd,
    uneven: bool = False,
    given: Sequence[Batch] | None = None,
    loss_fn: Any = F.cross_entropy,
    before: Callable[..., Any] | None = None,
    **how: Any,
) -> tuple[list[State], list[Any]]:
    """States of workers, and what their loops returned."""
    copies = [copy.deepcopy(model) for _ in range(workers + tail)]
    cluster = replace(cluster_of(workers), tail=tuple(f"tail{t}" for t in range(tail)))
    batches = given or features(WIDTH, CLASSES)
    how = {"pins": PINS} | how

    def work(comm: ThreadComm) -> Any:
        mine = copies[comm.rank]
        own = [rows_of(batch, min(comm.rank, workers - 1), workers, uneven) for batch in batches]
        with using(comm, cluster) as session:
            its, its_loss = optimizer(mine.parameters()), copy.deepcopy(loss_fn)
            if before is not None:
                before(mine, its)
            with suppress(SystemExit):
                _, its_loss, _ = shoal.parallelize(mine, its_loss, its, sample=own[0], **how)
                plan = session.attached[mine].plan
                held = [choice.holder for choice in plan.choices if choice.strategy == "pipeline"]
                assert how["pins"] not in (PINS, None) or (held and min(held) >= workers)
                return loop(mine, its_loss, its, own), state(mine)
        assert comm.rank >= workers
        return None, {}

    hosts = cluster.topology.hosts + cluster.tail
    results = run(workers + tail, work, timeout_s=60, hosts=hosts, tail=tail)
    return [r[1] for r in results[:workers]], [r[0] for r in results[:workers]]


def assert_same(model: nn.Module, loop: Loop = plain, within: float = 1e-10, **how: Any) -> None:
    """Workers get what one process gets, with the same bits."""
    expected = Training(
        model=model,
        batches=how.get("given") or features(WIDTH, CLASSES),
        optimizer=how.get("optimizer", sgd),
        loop=loop,
        loss_fn=how.get("loss_fn", F.cross_entropy),
    ).alone()
    got, _ = together(model, loop, **how)
    assert_same_bits(got)
    assert difference(state(model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0]) <= within


SHARED = {
    "cut": {"tail.1": "stage:column_pair", "tail.3": "stage:row_pair", "tail.5": "stage:column"},
    "sliced": {"tail.*": "stage:sliced"},
    "replicated": {"tail.*": "stage:replicate:ring"},
    "by inputs": {"tail.*": "stage:row"},
    "factor": {"tail.*": "stage:factor"},
    "as planned": {"tail.*": "stage"},
}


def clip_of(optimizer: Any, most: float) -> None:
    torch.nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], most
    )


class Tokens(nn.Module):
    """Rows of tokens in the body, which the tail takes as one dimension, and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.ends = nn.ModuleDict({"pool": Pooled()})

    def forward(self, ids: Tensor) -> Tensor:
        return self.ends["pool"](torch.tanh(self.table(ids)))


class Pooled(nn.Module):
    """Not nn.Sequential: it is an end of the model as a whole, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.frozen = nn.Linear(CLASSES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.head(x))).mean(1)


def tokens() -> list[Batch]:
    return [(integers(7, 12, 3, seed=s), integers(CLASSES, 12, seed=s)) for s in range(5)]
