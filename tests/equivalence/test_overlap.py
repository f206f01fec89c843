"""Updates overlap with what looks at parameters: delays and random acts never give a wrong bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import (
    SMALL,
    built,
    cluster_of,
    features,
    rows_of,
    sgd,
    with_options,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.facts import Cluster, Link, Topology
from shoal.engine.routes import Routes
from shoal.front.session_start import using
from shoal.servers.servers import serve
from shoal_tools.testing.planned_faults import FaultyComm, RandomDelay


def test_a_cut_parameter_waits_for_all_its_parts_when_another_is_looked_at():
    """The bias is in a transfer with the last part of a weight, whose other parts are still on
    their way.
    """
    model, batches = (
        built(lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))),
        features(7, 3, steps=20),
    )

    def trained(comm: Comm) -> list[Tensor]:
        mine, rows = copy.deepcopy(model), [rows_of(batch, comm.rank, 2) for batch in batches]
        with using(comm, cluster_of(2)):
            optimizer = sgd(mine.parameters())
            shoal.parallelize(
                mine,
                F.cross_entropy,
                optimizer,
                sample=rows[0],
                pins={"*": "sliced:direct"},
                search_options=SMALL,
            )
            for x, y in rows:
                optimizer.zero_grad()
                F.cross_entropy(mine(x), y).backward()
                optimizer.step()
                assert [mine[2].bias.sum(), mine[0].bias.sum()]
            return [parameter.detach() for parameter in mine.parameters()]

    calm = run(2, trained)[0]
    for late in run(
        2, lambda comm: trained(FaultyComm(comm, [RandomDelay(0.003, seed=comm.rank)]))
    ):
        assert all(torch.equal(one, other) for one, other in zip(calm, late, strict=True))


def test_a_module_waits_for_its_own_parameters_and_for_no_others(search_options, monkeypatch):
    """`step()` returns, and the first layer runs, while the last one's parameters are held back."""
    model, (x, y) = (
        built(lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))),
        features(7, 3)[0],
    )
    may_come, everybody, later = threading.Event(), threading.Barrier(2), Routes.later

    def held_back(
        routes: Routes, transfer: OwnedTransfer, work: Callable[[Comm], None], what: str
    ) -> Any:
        held = what == "update and return" and any(
            each.numel() == 27 for each in transfer.parameters
        )
        return later(
            routes,
            transfer,
            (lambda comm: may_come.wait(20) and work(comm)) if held else work,
            what,
        )

    def trained(comm: Comm) -> None:
        mine, (own, its) = copy.deepcopy(model), rows_of((x, y), comm.rank, 2)
        with using(comm, cluster_of(2)):
            optimizer = sgd(mine.parameters())
            options = {
                "pins": {"0": "sliced:direct", "2": "sliced:ring"},
                "search_options": search_options,
            }
            shoal.parallelize(mine, F.cross_entropy, optimizer, sample=(own, its), **options)
            before = mine[0].weight.detach().clone()
            F.cross_entropy(mine(own), its).backward()
            optimizer.step()
            hidden = torch.tanh(mine[0](own))
            assert not torch.equal(mine[0].weight, before)
            last = threading.Thread(target=mine[2], args=(hidden.detach(),))
            last.start()
            last.join(0.2)
            assert last.is_alive(), "the last layer waits"
            everybody.wait(20)
            may_come.set()
            last.join(20)
            assert not last.is_alive()

    monkeypatch.setattr(Routes, "later", held_back)
    run(2, trained, timeout_s=30)


def acted(model: nn.Sequential, optimizer: torch.optim.Optimizer, act: int, first: bool) -> None:
    """Take a step, with something else before it or behind it."""
    if act == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif act == 1:
        optimizer.clip_grad_norm_(0.1)
    elif act == 2:
        return  # one more backward for this step
    elif act == 3:
        assert model[0].weight.grad is not None
    optimizer.step()
    if act == 4 and first:
        model.state_dict()
    elif act == 5:
        model[6].weight.data.mul_(0.999)
    elif act == 6:
        optimizer.state_dict()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps", [160, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_starts_and_stops_of_overlap_under_delays_never_give_a_wrong_bit(owned_way, steps):
    """In each step something else happens between, and messages take their time."""
    torch.manual_seed(0)
    _, options = with_options(owned_way)
    low = "memory" in options
    ranks, steps = 2, steps // 4 if low else steps
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(9, 9), nn.Tanh())))
    rows = torch.randn(ranks, 20, 4, 9)
    acts = torch.randint(12, (steps,)).tolist()

    def trained(comm: Comm, **how: str) -> list[Tensor]:
        mine = copy.deepcopy(model)
        cluster = Cluster(Topology(("host",) * comm.size), Link(1e-4, 1e8))
        with using(comm, cluster) as session:
            optimizer = torch.optim.SGD(mine.parameters(), 0.01, momentum=0.9)
            pins = {"*": "sliced:direct", "2": "replicate:direct", "4": "sliced:ring"}
            sample = rows[comm.rank, 0], rows[comm.rank, 0]
            how = options | {"pins": pins} | how
            shoal.parallelize(mine, F.mse_loss, optimizer, sample=sample, **how)
            assert {c.strategy for c in session.attached[mine].plan.choices} == {
                "sliced",
                "replicate",
            }
            for step, act in enumerate(acts):
                x = rows[comm.rank, step % 20]
                F.mse_loss(mine(x), x).backward()
                acted(mine, optimizer, act, first=comm.rank == 0)
            return [p.detach().clone() for p in mine.parameters()]

    def delayed(comm: ThreadComm) -> list[Tensor]:
        return trained(FaultyComm(comm, [RandomDelay(1e-4, seed=comm.rank)]))

    quiet = run(ranks, lambda comm: trained(comm, memory="fast"))
    late = run(ranks, delayed, timeout_s=120)
    for a, b in zip(quiet + quiet, quiet[1:] + quiet[:1] + late, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, 150])
def test_every_scheme_under_delays_and_random_acts_is_as_one_process(owner_way, steps):
    """Of each exchange and of factors a layer, or of servers; the same bits as without delays."""
    torch.manual_seed(0)
    way, with_way = with_options(owner_way)
    served = int(way == "server")
    ranks, hosts = 3, ("a", "a", "b", "c")[: 3 + served]
    model = nn.Sequential(
        *(layer for _ in range(5) for layer in (nn.Linear(9, 9), nn.Tanh()))
    ).double()
    rows = torch.randn(ranks, 20, 4, 9, dtype=torch.float64)
    acts = torch.randint(12, (steps if owner_way == "sliced" else 30,)).tolist()
    others = {"2": "replicate:tree", "4": "sliced:ring"}
    mixed = {"*": "sliced:direct", **others, "6": "sliced:hierarchical", "8": "factor"}
    pins = {"*": "server", **others} if served else mixed
    cluster = Cluster(Topology(hosts[:ranks]), Link(1e-4, 1e8), servers=hosts[ranks:])

    def trained(comm: Comm) -> list[Tensor]:
        if comm.rank >= ranks:
            serve(comm)
            return []
        mine = copy.deepcopy(model)
        own, options = rows.transpose(0, 1).flatten(1, 2), {}
        if comm.size > 1:
            own, options = rows[comm.rank], {"pins": pins} | with_way
        with using(comm, cluster):
            optimizer = torch.optim.SGD(mine.parameters(), 0.01, momentum=0.9)
            shoal.parallelize(mine, F.mse_loss, optimizer, sample=(own[0], own[0]), **options)
            for step, act in enumerate(acts):
                x = own[step % 20]
                F.mse_loss(mine(x), x).backward()
                acted(mine, optimizer, act, first=comm.rank == 0)
            return [p.detach().clone() for p in mine.parameters()]

    def delayed(comm: ThreadComm) -> list[Tensor]:
        return trained(FaultyComm(comm, [RandomDelay(1e-4, seed=comm.rank)]))

    quiet, late = (
        run(ranks + served, work, hosts=hosts, servers=served)[:ranks]
        for work in (trained, delayed)
    )
    for each in (*quiet[1:], *late):
        assert all(torch.equal(one, other) for one, other in zip(quiet[0], each, strict=True))
    for one, other in zip(quiet[0], trained(ThreadComm()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
