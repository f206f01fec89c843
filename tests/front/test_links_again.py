"""Links are measured once a session, and again only where they carry something else by then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.front import cluster
from shoal.front.session_start import using

RANKS, TRIED = 2, 1e8


class Probes:
    """How often each rank has measured links, and what a trial finds."""

    def __init__(self) -> None:
        self.full = [0] * RANKS
        self.found = TRIED

    def probe(self, comm: ThreadComm, **_: Any) -> Link:
        self.full[comm.rank] += 1
        return Link(1e-4, 1e8)

    def now(self, comm: ThreadComm, link: Link) -> float:
        return self.found


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    made = Probes()
    monkeypatch.setattr(cluster, "probe_link", made.probe)
    monkeypatch.setattr(cluster, "probe_now", made.now)
    monkeypatch.setattr(cluster, "probe_paces", lambda *_, **__: {})
    monkeypatch.setattr(cluster, "probe_moves", lambda *_, **__: None)
    return made


def parallelised(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = torch.ones(4, 4), torch.zeros(4, 2)
    shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)
    return model


def two_a_rank() -> list[list[nn.Module]]:
    return [[nn.Linear(4, 2), nn.Linear(4, 2)] for _ in range(RANKS)]


@pytest.mark.parametrize(
    ("found", "times"), [(TRIED, 1), (0.7 * TRIED, 1), (0.1 * TRIED, 2), (10 * TRIED, 2)]
)
def test_a_second_model_measures_links_again_only_where_they_changed(
    found: float, times: int, probes: Probes
) -> None:
    models = two_a_rank()

    def work(comm: ThreadComm) -> None:
        first, second = models[comm.rank]
        with using(comm) as session:
            parallelised(first)
            comm.gather_objects(None, "the test")
            probes.found = found
            comm.gather_objects(None, "the test")
            parallelised(second)
            assert session.attached[first].cluster.link.tried == TRIED
            assert session.attached[second].cluster.link.tried == (found if times > 1 else TRIED)

    run(RANKS, work, timeout_s=30)
    assert probes.full == [times] * RANKS


def test_one_busy_moment_is_no_change(probes: Probes, monkeypatch: pytest.MonkeyPatch) -> None:
    models, rates = two_a_rank(), [[TRIED, 0.1 * TRIED, TRIED] for _ in range(RANKS)]
    monkeypatch.setattr(cluster, "probe_now", lambda comm, _: rates[comm.rank].pop(0))

    def work(comm: ThreadComm) -> None:
        with using(comm):
            for model in models[comm.rank]:
                parallelised(model)

    run(RANKS, work, timeout_s=30)
    assert probes.full == [1] * RANKS
    assert rates == [[], []]


def test_ranks_of_one_host_do_not_measure_again(probes: Probes) -> None:
    models = two_a_rank()

    def work(comm: ThreadComm) -> None:
        with using(comm):
            for model in models[comm.rank]:
                parallelised(model)
                comm.gather_objects(None, "the test")
                probes.found = 0.1 * TRIED
                comm.gather_objects(None, "the test")

    run(RANKS, work, hosts=["one", "one"], timeout_s=30)
    assert probes.full == [1] * RANKS


def test_a_cluster_that_was_given_is_never_measured(probes: Probes) -> None:
    given, models = Cluster(Topology(("one", "other")), Link(1e-4, 1e8)), two_a_rank()

    def work(comm: ThreadComm) -> None:
        with using(comm, given) as session:
            for model in models[comm.rank]:
                assert session.attached[parallelised(model)].cluster == given

    run(RANKS, work, timeout_s=30)
    assert probes.full == [0] * RANKS
