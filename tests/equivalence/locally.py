"""Local steps as plain renderings of their algorithms have them, and as ranks make them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    call,
    cluster_of,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.joining import using

RULES = {
    "nesterov": shoal.Outer(lr=0.7, momentum=0.9),
    "average": shoal.Outer(rule="average"),
    "slowmo": shoal.Outer(momentum=0.6, rule="slowmo"),
    "bmuf": shoal.Outer(rule="bmuf"),
}
STEPS, ROUND = 8, 3  # the last round is not full
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def net() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))


def with_norm() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.2, momentum=0.5)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass
class Plain:
    """The algorithms as their papers have them, for N workers in one process."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    outer: shoal.Outer
    every: int
    old: list[Tensor] = field(init=False)
    velocity: list[Tensor] = field(init=False)
    rows: list[int] = field(init=False)
    steps: int = 0
    rate_before: float = 0.0

    def __post_init__(self) -> None:
        self.old = [p.detach().clone() for p in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.old]
        self.rows = [0] * len(self.models)

    def step(self, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            model, optimizer = self.models[number], self.optimizers[number]
            optimizer.zero_grad()
            F.cross_entropy(call(model, x), y).backward()
            optimizer.step()
            self.rows[number] += len(y)
        self.steps += 1
        if self.steps % self.every == 0:
            self.come_together()

    @torch.no_grad()
    def come_together(self) -> None:
        workers = [list(model.parameters()) for model in self.models]
        shares = [rows / sum(self.rows) for rows in self.rows]
        n, rate = len(workers), self.optimizers[0].param_groups[0]["lr"]
        for index, old in enumerate(self.old):
            mean = sum(share * ps[index] for share, ps in zip(shares, workers, strict=True))
            v = self.velocity[index]
            if self.outer.rule == "average":
                new = mean
            elif self.outer.rule == "nesterov":  # torch's own optimizer
                parameter = nn.Parameter(old.clone())
                torch_sgd = SGD(
                    [parameter], self.outer.lr or 0.0, self.outer.momentum or 0.0, nesterov=True
                )
                torch_sgd.state[parameter]["momentum_buffer"] = v
                parameter.grad = old - mean
                torch_sgd.step()
                new = parameter.detach()
            elif self.outer.rule == "slowmo":  # algorithm 1, line 7 and 8
                v.mul_(self.outer.momentum or 0.0).add_((old - mean) / rate)
                new = old - 1.0 * rate * v
            else:  # block momentum 1 - 1/N, block learning rate 1
                v.mul_(1 - 1 / n).add_(mean - old)
                new = old + v
            old.copy_(new)
            for parameters in workers:
                parameters[index].copy_(new)
        for buffers in zip(*(model.buffers() for model in self.models), strict=True):
            if buffers[0].is_floating_point():
                mean = sum(share * b for share, b in zip(shares, buffers, strict=True))
                for buffer in buffers:
                    buffer.copy_(mean)
        self.rows = [0] * n


def plain(
    make_model: Callable[[], nn.Module],
    make: Make,
    outer: shoal.Outer,
    ranks: int,
    batches: Sequence[Batch],
    *,
    uneven: bool = False,
    schedule: bool = False,
) -> Plain:
    models = [copy.deepcopy(make_model()) for _ in range(ranks)]
    workers = Plain(models, [make(m.parameters()) for m in models], outer, ROUND)
    for number, batch in enumerate(batches):
        workers.step([rows_of(batch, rank, ranks, uneven) for rank in range(ranks)])
        if schedule:
            set_rates(workers.optimizers, number)
    return workers


def set_rates(optimizers: Iterable[Optimizer], number: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (number + 2)


def on_ranks(
    make_model: Callable[[], nn.Module],
    make: Make,
    outer: shoal.Outer | None,
    ranks: int,
    batches: Sequence[Batch],
    *,
    uneven: bool = False,
    schedule: bool = False,
    **options: Any,
) -> tuple[list[State], list[State]]:
    """Each rank's own state after training, and what all have in common."""
    models = [copy.deepcopy(make_model()) for _ in range(ranks)]

    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        model = models[comm.rank]
        with using(comm, cluster_of(ranks)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                F.cross_entropy,
                make(model.parameters()),
                sample=mine[0],
                local_steps=ROUND,
                outer=outer,
                **options,
            )
            optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
            for number, (x, y) in enumerate(mine):
                model.zero_grad()
                loss_fn(call(model, x), y).backward()
                for each in optimizers:
                    each.step()
                if schedule:
                    set_rates(optimizers, number)
            own = state(model)
            with shoal.global_weights(model):
                common = state(model)
            assert_same_bits([own, state(model)])
            return own, common

    own, common = zip(*run(ranks, work, timeout_s=20), strict=True)
    return list(own), list(common)
