"""Local steps as plain renderings of their algorithms have them, and as ranks make them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

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
from one_process import plain as steps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

RULES = {
    "nesterov": shoal.Outer(lr=0.7, momentum=0.9),
    "average": shoal.Outer(rule="average"),
    "slowmo": shoal.Outer(momentum=0.6, rule="slowmo"),
    "bmuf": shoal.Outer(rule="bmuf"),
}
STEPS, ROUND = 8, 3  # the last round is not full
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
T = TypeVar("T")


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
    warmup: int = 0  # exact steps first: everybody has all rows
    length: int = 0  # of this round, if rounds grow: 1 first, then twice as many up to `every`
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
        if self.warmup:
            batches = [joined(batches)] * len(self.models)
        for number, (x, y) in enumerate(batches):
            model, optimizer = self.models[number], self.optimizers[number]
            optimizer.zero_grad()
            F.cross_entropy(call(model, x), y).backward()
            optimizer.step()
            self.rows[number] += len(y)
        self.note_step()

    def note_step(self) -> None:
        if self.warmup:
            self.warmup -= 1
            self.old = [p.detach().clone() for p in self.models[0].parameters()]
            self.rows = [0] * len(self.rows)
            return
        self.steps += 1
        if self.steps == (self.length or self.every):
            self.come_together()
            self.steps, self.length = 0, min(2 * self.length, self.every)

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


@dataclass
class Grouped(Plain):
    """A model for each rank: those of a group exchange gradients and buffers in each step."""

    groups: Sequence[Sequence[int]] = ()

    def step(self, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            self.optimizers[number].zero_grad()
            F.cross_entropy(call(self.models[number], x), y).backward()
            self.rows[number] += len(y)
        everybody = [range(len(self.models))]
        for group in everybody if self.warmup else self.groups:
            rows = [len(batches[number][1]) for number in group]
            shares = [own / sum(rows) for own in rows]
            models = [self.models[number] for number in group]
            for ps in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(share * p.grad for share, p in zip(shares, ps, strict=True))
                for p in ps:
                    p.grad = mean.clone()
            for buffers in zip(*(model.buffers() for model in models), strict=True):
                if buffers[0].is_floating_point():
                    mean = sum(share * b for share, b in zip(shares, buffers, strict=True))
                    for buffer in buffers:
                        buffer.copy_(mean)
        for optimizer in self.optimizers:
            optimizer.step()
        self.note_step()


def joined(batches: Iterable[Batch]) -> Batch:
    """The rows of several batches as one."""
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def islands_of(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host."""
    return list(Topology(tuple(hosts)).ranks_on.values())


def on_hosts(hosts: Sequence[str]) -> Cluster:
    """Ranks on these hosts, and links that nobody need measure."""
    return Cluster(Topology(tuple(hosts)), Link(latency_s=1e-4, bytes_per_s=1e9))


def plain(
    make_model: Callable[[], nn.Module],
    make: Make,
    outer: shoal.Outer,
    ranks: int,
    batches: Sequence[Batch],
    *,
    uneven: bool = False,
    schedule: bool = False,
    hosts: Sequence[str] | None = None,
) -> Plain:
    """A worker for each rank, or for each of these hosts."""
    islands = [(rank,) for rank in range(ranks)] if hosts is None else islands_of(hosts)
    models = [copy.deepcopy(make_model()) for _ in islands]
    optimizers = [make(m.parameters()) for m in models]
    workers = Plain(models, optimizers, outer, ROUND, outer.warmup_steps, int(outer.grows))
    for number, batch in enumerate(batches):
        mine = [rows_of(batch, rank, ranks, uneven) for rank in range(ranks)]
        workers.step([joined(mine[rank] for rank in island) for island in islands])
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
    hosts: Sequence[str] | None = None,
    **options: Any,
) -> tuple[list[State], list[State]]:
    """Each rank's own state after training, and what all have in common."""
    cluster = cluster_of(ranks) if hosts is None else on_hosts(hosts)
    models = [copy.deepcopy(make_model()) for _ in range(ranks)]

    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        model = models[comm.rank]
        with using(comm, cluster):
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

    own, common = zip(*run(ranks, work, timeout_s=20, hosts=hosts), strict=True)
    return list(own), list(common)


def spread(
    model: nn.Module, sample: Batch, *, make: Make = sgd, **options: Any
) -> tuple[Any, Any, Any]:
    """A model, its loss and its optimizer, that train by local steps."""
    options = {"local_steps": ROUND} | options
    return shoal.parallelize(
        model, F.cross_entropy, make(model.parameters()), sample=sample, **options
    )


def on_each(
    hosts: Sequence[str],
    work: Callable[[ThreadComm, nn.Module], T],
    models: Sequence[nn.Module] | None = None,
) -> list[T]:
    """What `work` returns of each rank's model. The ranks are on these hosts."""
    models = models or [net() for _ in hosts]

    def within(comm: ThreadComm) -> T:
        with using(comm, on_hosts(hosts)):
            return work(comm, models[comm.rank])

    return run(len(hosts), within, timeout_s=20, hosts=hosts)


def nothing(model: nn.Module, optimizer: Optimizer) -> None:
    """Look at nothing."""


def train(
    hosts: Sequence[str],
    models: Sequence[nn.Module],
    batches: Sequence[Batch],
    *,
    make: Make = sgd,
    loads: Path | None = None,
    saves: Path | None = None,
    each: Callable[[nn.Module, Optimizer], Any] = nothing,
    **options: Any,
) -> list[list[Any]]:
    """Train a model on each rank, unevenly; what each of them saw behind each step.

    Args:
        hosts: of the ranks.
        models: theirs.
        batches: of all ranks.
        make: makes the optimizer.
        loads: the checkpoint that they go on from.
        saves: where they save at the end.
        each: looks behind each step.
        options: of `parallelize`.
    """

    def work(comm: ThreadComm, model: nn.Module) -> list[Any]:
        mine = [rows_of(batch, comm.rank, comm.size, True) for batch in batches]
        model, loss_fn, optimizer = spread(model, mine[0], make=make, **options)
        if loads is not None:
            shoal.load(loads, model=model, optimizer=optimizer)
        seen = []
        for batch in mine:
            steps(model, loss_fn, optimizer, [batch])
            seen.append(each(model, optimizer))
        if saves is not None:
            own = state(model)
            shoal.save(saves, model=model, optimizer=optimizer)
            assert_same_bits([own, state(model)])
        return seen

    return on_each(hosts, work, models)


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of optimizers' states."""
    mean = copy.deepcopy(states[0])
    for number, values in mean["state"].items():
        for name in values:
            every = [each["state"][number][name] for each in states]
            values[name] = torch.stack(every).mean(0)
    return mean


def going_on(workers: Plain, count: int, make: Make) -> Plain:
    """So many workers that go on from a checkpoint of these."""
    exact = bool(workers.warmup)
    models = [copy.deepcopy(workers.models[0]) for _ in range(count)]
    optimizers = [make(m.parameters()) for m in models]
    others = Plain(models, optimizers, workers.outer, ROUND, workers.warmup, workers.length)
    for model, optimizer in zip(models, others.optimizers, strict=True):
        for p, old in zip(model.parameters(), workers.old, strict=True):
            p.data.copy_(old)
        states = [o.state_dict() for o in workers.optimizers]
        optimizer.load_state_dict(copy.deepcopy(states[0]) if exact else mean_of(states))
    others.velocity = [v.clone() for v in workers.velocity]
    others.old = [old.clone() for old in workers.old]
    return others


def shares(batch: Batch, hosts: Sequence[str], *, islands: bool) -> list[Batch]:
    """What each worker has of a batch: a host, or a rank."""
    mine = [rows_of(batch, rank, len(hosts), True) for rank in range(len(hosts))]
    return (
        [joined(mine[rank] for rank in island) for island in islands_of(hosts)] if islands else mine
    )
