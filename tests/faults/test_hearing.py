"""A rank that waits for nobody hears of another's death all the same: in its next step or batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PeerLost
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal.servers.servers import serve
from shoal_tools.testing.planned_faults import Planted

LABELS = torch.tensor([0, 1, 2, 0])


class Job:
    """A tiny model of one rank, and what a script does with it between two exchanges."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.model, self.loss_fn, self.optimizer = shoal.parallelize(
            model, nn.CrossEntropyLoss(), optimizer, sample=(self.rows, LABELS), **options
        )
        rows = TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.long))
        self.batches = iter(shoal.shard(DataLoader(rows, batch_size=2)))

    def forward(self) -> Tensor:
        loss: Tensor = self.loss_fn(self.model(self.rows), LABELS)
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def accumulate(self) -> None:
        with self.optimizer.accumulate():
            self.forward().backward()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model(self.rows)

    def load(self) -> None:
        next(self.batches)


WAYS: dict[str, tuple[Callable[[Job], None], dict[str, Any]]] = {
    "a local step": (Job.step, {"local_steps": 400}),
    "a step that pushes to servers later": (Job.step, {"local_steps": 400}),
    "a step within an update period": (Job.step, {"update_every": {"*": 50}}),
    "a micro-batch": (Job.accumulate, {"local_steps": 400}),
    "a batch of an evaluation": (Job.evaluate, {}),
    "a batch of a loader": (Job.load, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_hears_of_a_death_where_nothing_is_exchanged(way: str) -> None:
    go_on, options = WAYS[way]
    servers = int("servers" in way)
    told: list[PeerLost] = []
    both = threading.Barrier(2)

    def work(comm: ThreadComm) -> None:
        if comm.rank == 2:
            serve(comm)
            return
        topology = Topology(("h0", "h1"))
        links = {"servers": ("h2",)} if servers else {}
        with using(comm, Cluster(topology, Link(1e-4, 1e8), 1.0, **links)):
            job = Job(comm.rank, **options)
            go_on(job)
            both.wait()
            if comm.rank == 1:
                raise Planted
            while comm.hub.lost is None:
                time.sleep(0.002)
            with pytest.raises(PeerLost) as caught:
                go_on(job)
            told.append(caught.value)

    with pytest.raises(Planted):
        hosts = ("h0", "h1", "h2")[: 2 + servers]
        run(len(hosts), work, timeout_s=20, hosts=hosts, servers=servers)
    assert [error.rank for error in told] == [1]
