"""A run that is killed and goes on with as many ranks ends bit for bit as an undisturbed one.

With the same plan: a plan that is made anew may have other buckets or chunks, and so other sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import change_job
import pytest
import torch
from change_job import OPTIMIZERS, WAYS
from one_process import built, cluster_of
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.checkpoint import host_memory
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using

RANKS, STEPS = 3, 14  # an epoch has eleven
HOSTS = ("a", "b", "c")


class Killed(Exception):
    """The end of a run."""


@pytest.fixture(autouse=True)
def memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SHOAL_HOST_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(host_memory, "_TRIES", 1)


def trained(comm: ThreadComm, way: str, optimizer_name: str, folder: Path, until: int) -> Any:
    """Train as benchmarks/change_job.py does, up to a step; return the first step and weights."""
    model = built(
        lambda: nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    )
    loss_fn, optimizer = nn.CrossEntropyLoss(), OPTIMIZERS[optimizer_name](model.parameters())
    order = torch.Generator().manual_seed(2)
    rows = DataLoader(change_job.Rows(), change_job.BATCH, shuffle=True, generator=order)
    loader = shoal.shard(rows, batch="global")
    objects = {"model": model, "optimizer": optimizer, "loader": loader}
    saved = shoal.Checkpoints(folder, every_s=1e6, in_memory_every=4, **objects)
    saved.resume()
    first, sample = saved.steps, torch.zeros(change_job.BATCH, dtype=torch.int64)
    plan = folder.with_name("plan.json")
    how: dict[str, Any] = {"plan": plan} if plan.exists() else {"pins": WAYS[way]}
    shoal.parallelize(model, loss_fn, optimizer, sample=(sample, sample), **how)
    made = shoal.plan_of(model)
    if comm.rank == 0 and made is not None:
        made.save(plan)
    while saved.steps < until:
        for _, x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            saved.step()
            assert saved._memory is not None
            saved._memory.settle()
            if saved.steps == until:
                break
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved.__exit__(Killed, Killed(), None)
    return first, weights


def on_ranks(way: str, optimizer: str, folder: Path, until: int) -> list[Any]:
    cluster = shoal.Cluster(shoal.Topology(HOSTS), cluster_of(RANKS).link)

    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster):
            return trained(comm, way, optimizer, folder, until)

    return run(RANKS, each, timeout_s=30, hosts=HOSTS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_same_ranks_same_bits(way: str, optimizer: str, tmp_path: Path) -> None:
    expected = on_ranks(way, optimizer, tmp_path / "whole", STEPS)
    killed = on_ranks(way, optimizer, tmp_path / "run", 10)
    assert [first for first, _ in killed] == [0] * RANKS
    found = on_ranks(way, optimizer, tmp_path / "run", STEPS)
    assert [first for first, _ in found] == [8] * RANKS
    for (_, got), (_, wanted) in zip(found, expected, strict=True):
        different = [name for name, value in wanted.items() if not torch.equal(value, got[name])]
        assert not different
