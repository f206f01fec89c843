"""Checkpoints of local steps come as a round ends, so a restart costs a round at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from locally import net
from one_process import cluster_of, features, rows_of
from torch import optim
from torch.nn import functional as F

import shoal
from shoal.checkpoint import host_memory
from shoal.comm.threads import ThreadComm, run
from shoal.front import checkpoints
from shoal.front.checkpoints import CrewChanges
from shoal.front.session_start import using

pytestmark = pytest.mark.quick
ROUND, STEPS, HOSTS = 3, 9, ("a", "b")


class Killed(Exception):
    """The end of a run."""


@pytest.fixture(autouse=True)
def memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("SHOAL_HOST_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(host_memory, "_TRIES", 1)


def on_ranks(folder: Path, until: int, **options: Any) -> list[Any]:
    """Train up to a step in which all are killed; return generations and weights of each rank."""

    def work(comm: ThreadComm) -> Any:
        model = net().double()
        optimizer = optim.SGD(model.parameters(), lr=0.2)
        rows = [rows_of(batch, comm.rank, comm.size) for batch in features(6, 4, steps=STEPS)]
        objects = {"model": model, "optimizer": optimizer}
        saved = shoal.Checkpoints(folder, every_s=1e6, in_memory_every=2, **objects)
        saved.resume()
        first, made = saved.steps, []
        outer = shoal.Outer(rule="average", **{"lag": 0, **options})
        lossy = {"local_steps": ROUND, "outer": outer}
        shoal.parallelize(model, F.cross_entropy, optimizer, sample=rows[0], **lossy)
        try:
            for x, y in rows[first:until]:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                saved.step()
                assert saved._memory is not None
                saved._memory.settle()
                made.append(saved.memory_cost.step if saved.memory_cost else 0)
        except CrewChanges:
            made.append(saved.steps)
        saved.__exit__(Killed, Killed(), None)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return first, sorted({*made}), weights

    cluster = shoal.Cluster(shoal.Topology(HOSTS), cluster_of(2).link)

    def each(comm: ThreadComm) -> Any:
        with using(comm, cluster):
            return work(comm)

    return run(2, each, timeout_s=20, hosts=HOSTS)


def test_a_lost_island_costs_a_round_at_most(tmp_path: Path) -> None:
    whole = on_ranks(tmp_path / "whole", STEPS)
    (first, generations, _), _ = on_ranks(tmp_path / "run", 8)
    assert (first, generations) == (0, [0, 3, 6])
    again = on_ranks(tmp_path / "run", STEPS)
    assert [own[0] for own in again] == [6, 6]
    for rank in (0, 1):
        expected = whole[rank][2]
        assert all(torch.equal(value, expected[name]) for name, value in again[rank][2].items())


def test_hosts_that_come_wait_for_the_end_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "has_agent", lambda: True)
    monkeypatch.setattr(checkpoints, "is_asked_to_end", lambda: True)
    (_, made, _), _ = on_ranks(tmp_path / "run", STEPS)
    assert made == [0, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"warmup_steps": 2}, [0, 2, 5, 8]), ({"warmup_steps": 1, "grows": True}, [0, 2, 4, 7])],
)
def test_rounds_are_counted_from_the_first_one(
    options: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    (_, generations, _), _ = on_ranks(tmp_path / "run", STEPS, **options)
    assert generations == expected


def test_with_a_lag_no_moment_is_better(tmp_path: Path) -> None:
    (_, generations, _), _ = on_ranks(tmp_path / "run", 5, lag=1)
    assert generations == [0, 2, 4]
