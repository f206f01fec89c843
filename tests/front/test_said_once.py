"""What surprises people is said once, by rank 0: whose batch it is, whose loss, and who writes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

BATCH = (
    'batch: 32 rows a rank, 64 of all ranks; shard(loader, batch="global") makes it 32 rows of all'
)
OWN = "each rank's loss is of its own rows, and shoal.mean(loss, weight=rows) is that of all"


def lines(caplog: pytest.LogCaptureFixture, work: Any, ranks: int = 2) -> list[str]:
    hosts = ("one", "other")[:ranks]

    def on_rank(comm: ThreadComm) -> None:
        with using(comm) as session:
            session.cluster = Cluster(Topology(hosts), Link(1e-4, 1e8))
            work(comm.rank)

    with caplog.at_level(logging.INFO, "shoal"):
        run(ranks, on_rank, timeout_s=20)
    return [record.getMessage() for record in caplog.records]


def sharded(**options: Any) -> Any:
    return shoal.shard(DataLoader(torch.arange(128.0), batch_size=32), **options)


def parallelized(rank: int) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = torch.full((3, 4), float(rank)), torch.zeros(3, 2)
    shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)


def test_the_batch_of_a_rank_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, lambda rank: [sharded(), sharded()]).count(BATCH) == 1


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {"batch": "global"}), (2, {"shares": [1, 3]})]
)
def test_whoever_is_alone_or_asked_is_told_nothing(
    ranks: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert not lines(caplog, lambda rank: sharded(**options), ranks)


def test_whose_loss_it_is_and_who_writes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    said = lines(caplog, lambda rank: [parallelized(rank), parallelized(rank)])
    own = [line for line in said if line.startswith(OWN)]
    assert len(own) == 1 and "world().is_main" in own[0]
