"""Cases of bad input as data, and what every rank is told of one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

RANKS = 3


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def model(hidden: int = 8) -> nn.Module:
    layers = {
        "norm": nn.LayerNorm(6),
        "hidden": nn.Linear(6, hidden),
        "relu": nn.ReLU(),
        "head": nn.Linear(hidden, 3),
    }
    return nn.Sequential(OrderedDict(layers))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Case:
    """What each rank gives, as functions of the rank, and what every rank is told."""

    error: type[Exception]
    said: tuple[str, ...]
    model: Callable[[int], Any] = lambda rank: model()
    loss: Callable[[int], Any] = lambda rank: nn.CrossEntropyLoss()
    optimizer: Callable[[int, Any], Any] = lambda rank, model: sgd(model.parameters())
    options: Callable[[int], dict[str, Any]] = field(default=lambda rank: {})
    # what the loop feeds; a case that gets there fails at its first forward
    batch: Callable[[int], Any] = batch


def only(bad_rank: int, bad: Any, good: Any) -> Callable[[int], Any]:
    return lambda rank: bad if rank == bad_rank else good


def option(**options: Any) -> Callable[[int], dict[str, Any]]:
    return lambda rank: options


def told(case: Case, ranks: int = RANKS) -> list[Exception]:
    """What every rank hears as it parallelises and makes one step."""

    def work(comm: ThreadComm) -> Exception:
        with using(comm) as session:
            hosts = tuple(f"h{rank}" for rank in range(ranks))
            # so no links are measured
            session.cluster = Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)
            its_model = case.model(comm.rank)
            optimizer = case.optimizer(comm.rank, its_model)
            options = {"sample": batch(comm.rank), **case.options(comm.rank)}
            try:
                its_model, loss, optimizer = shoal.parallelize(
                    its_model, case.loss(comm.rank), optimizer, **options
                )
                x, y = case.batch(comm.rank)
                if "compute_loss" in options:
                    loss(its_model, (x, y)).backward()
                else:
                    loss(its_model(x), y).backward()
            except UsageError as error:
                return error
        raise AssertionError(f"rank {comm.rank} went on")

    return run(ranks, work, timeout_s=20)
