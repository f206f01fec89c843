"""A small training script for tests of saving, whose ranks are threads."""

from __future__ import annotations

from typing import Any

import torch
from one_process import cluster_of, features, rows_of
from torch import nn, optim
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using


class Script:
    """A rank's training, parallelised."""

    def __init__(self, comm: ThreadComm) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Linear(7, 3).double()
        for parameter in self.model.parameters():
            parameter.data.normal_(generator=generator)
        self.optimizer = optim.AdamW(self.model.parameters())
        self.rows = [rows_of(batch, comm.rank, comm.size) for batch in features(7, 3, steps=8)]
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def start(self) -> None:
        shoal.parallelize(self.model, F.cross_entropy, self.optimizer, sample=self.rows[0])

    def step(self, number: int) -> None:
        x, y = self.rows[number]
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def on_ranks(ranks: int, work: Any, hosts: tuple[str, ...] = ()) -> list[Any]:
    cluster = cluster_of(ranks)
    if hosts:
        cluster = shoal.Cluster(shoal.Topology(hosts), cluster.link)

    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster):
            return work(comm, Script(comm))

    return run(ranks, each, timeout_s=20, hosts=cluster.topology.hosts)
