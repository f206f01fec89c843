"""Trains with servers beside the workers, and says what they observed."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from one_process import (
    SMALL,
    built,
    cluster_of,
    features,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.servers.servers import serve


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def trained(
    workers: int,
    servers: int,
    loop: Callable[..., object],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **how: object,
) -> tuple[list[dict[str, Tensor]], list[object], list[list[Counter[int]]]]:
    """States and what loops returned on workers, and what servers observed; in small buckets."""
    if "plan" not in how:
        how = {"search_options": SMALL} | how
    model, cluster = built(mlp), cluster_of(workers, servers)
    copies = [copy.deepcopy(model) for _ in range(workers)]
    batches = features(7, 3)

    def work(comm: ThreadComm) -> object:
        if comm.rank >= workers:
            return serve(comm)
        mine = copies[comm.rank]
        own = [rows_of(batch, comm.rank, workers) for batch in batches]
        with using(comm, cluster) as session:
            _, loss_fn, its = shoal.parallelize(
                mine, F.cross_entropy, optimizer(mine.parameters()), sample=own[0], **how
            )
            assert {choice.strategy for choice in session.attached[mine].plan.choices} == {"server"}
            return state(mine), loop(mine, loss_fn, its, own), state(mine)

    hosts = cluster.topology.hosts + cluster.servers
    results = run(workers + servers, work, timeout_s=20, hosts=hosts, servers=servers)
    return [r[2] for r in results[:workers]], [r[1] for r in results[:workers]], results[workers:]


def steps(
    number: int, pause: Callable[[int, int], float] = lambda rank, step: 0.0
) -> Callable[..., list[float]]:
    """A loop of so many steps, and its losses; `pause` gives the seconds that a rank sleeps in a
    step.
    """

    def loop(
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batches: list,
    ) -> list:
        losses = []
        for step, (x, y) in enumerate(endless(batches, number)):
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(pause(shoal.world().rank, step))
            optimizer.step()
            losses.append(loss.item())
        return losses

    return loop


def endless(batches: list, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(number):
        yield batches[step % len(batches)]
