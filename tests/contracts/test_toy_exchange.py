"""An exchange that only this file knows takes part like Shoal's own: plans, bytes, results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from made_up import cluster, layer, model
from one_process import Training, assert_same, built, cluster_of, features, mlp, rows_of, sgd
from performed import contribution, performed, total
from test_strategy import assert_stated
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, SplitExchange
from shoal.core import registry
from shoal.core.cost import Pace, Price, Traffic
from shoal.core.errors import PlanError, RanksDiffer
from shoal.core.facts import Topology
from shoal.front.session_start import using
from shoal.planner.search import search
from shoal.planner.search_options import Constraints


@dataclass(frozen=True)
class Relay(SplitExchange):
    """A ring in which slices travel whole, `step` ranks at a time."""

    name: ClassVar[str] = "relay"
    step: int = -1

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        ranks, sizes = topology.size, bucket.slice_bytes(topology.size)
        if ranks == 1:
            return Traffic((0.0,), (0.0,), rounds=0)
        after = [(r + self.step) % ranks for r in range(ranks)]
        before = [(r - self.step) % ranks for r in range(ranks)]
        sent = tuple(2 * sum(sizes) - sizes[r] - sizes[after[r]] for r in range(ranks))
        return Traffic(
            sent=sent,
            received=tuple(2 * sum(sizes) - sizes[r] - sizes[before[r]] for r in range(ranks)),
            rounds=2 * (ranks - 1) if bucket.numel else 0,
            leaving=tuple(sent[r] * topology.apart(r, after[r]) for r in range(ranks)),
        )

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        self._pass_on(slices, comm, first=comm.rank - self.step, add=True)

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        self._pass_on(slices, comm, first=comm.rank, add=False)

    def _pass_on(self, slices: Sequence[Tensor], comm: Comm, first: int, add: bool) -> None:
        after, before = (comm.rank + self.step) % comm.size, (comm.rank - self.step) % comm.size
        for turn in range(comm.size - 1):
            outgoing = slices[(first - turn * self.step) % comm.size]
            incoming = slices[(first - (turn + 1) * self.step) % comm.size]
            landed = torch.empty_like(incoming)
            pending = [comm.receive(landed, before)] if landed.numel() else []
            pending += [comm.send(outgoing, after)] if outgoing.numel() else []
            for each in pending:
                each.wait()
            incoming.copy_(incoming + landed if add else landed)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registry.registered(Relay):
        yield


@pytest.mark.parametrize("hosts", ["a", "ab", "abc", "aabb"])
@pytest.mark.parametrize("exchange", [Relay(), Relay(step=1)], ids=str)
def test_it_keeps_the_contract(exchange: Relay, hosts: str) -> None:
    ranks = len(hosts)
    outcomes = performed(exchange, ranks, 50, torch.float64, (), hosts)
    stated = exchange.traffic(Bucket(50, 8), Topology(tuple(hosts)))
    scale = sum(contribution(rank, 50, torch.float64).abs() for rank in range(ranks))
    for rank, outcome in enumerate(outcomes):
        assert torch.equal(outcome.after_gather, outcomes[0].after_gather)
        assert ((outcome.after_gather - total(ranks, 50)).abs() <= 1e-12 * scale).all()
        assert outcome.counts.bytes_sent == stated.sent[rank]
        assert outcome.counts.bytes_received == stated.received[rank]


@pytest.mark.parametrize("pin", ["replicate:relay", "sliced:relay", "sliced:relay(step=1)"])
def test_a_step_sends_the_bytes_that_are_stated(pin: str) -> None:
    assert_stated(pin, "aabb")


@pytest.mark.parametrize("way", ["replicate:relay", "sliced:relay(step=1)"])
def test_training_over_it_equals_one_process(way: str) -> None:
    assert_same(Training(model=built(mlp), batches=features(7, 3)), 3, way)


def test_the_planner_takes_it_where_it_is_fast() -> None:
    net = model(layer("large", 0.5, 4_000_000), layer("other", 1.0, 4_000_000))
    where = cluster(4, 25e6)
    slow, fast = (Pace(Price(1e-4, second), Price(0.0, 0.0)) for second in (4e-8, 1e-8))
    others = dict.fromkeys(("allreduce", "direct", "ring", "tree", "hierarchical"), slow)
    plan = search(
        net, replace(where, paces={**others, "relay": fast}), Constraints(strategies=["replicate"])
    )
    assert {choice.exchange for choice in plan.choices} == {"relay"}


def test_a_saved_plan_names_it_on_every_rank(tmp_path: Path) -> None:
    start, batches = built(mlp), features(7, 3, steps=2)
    saved = tmp_path / "plan.json"

    def train(plan: str | Path, pins: dict[str, str] | None) -> list[shoal.Plan | None]:
        def work(comm: ThreadComm) -> shoal.Plan | None:
            network = built(mlp)
            network.load_state_dict(start.state_dict())
            with using(comm, cluster_of(2)):
                sample = rows_of(batches[0], comm.rank, 2)
                optimizer = sgd(network.parameters())
                shoal.parallelize(
                    network, F.cross_entropy, optimizer, sample=sample, plan=plan, pins=pins
                )
                return shoal.plan_of(network)

        return run(2, work, timeout_s=60)

    first, _ = train("auto", {"*": "sliced:relay(step=1)"})
    assert first is not None
    first.save(saved)
    again, other = train(saved, None)
    assert again is not None and again.choices == first.choices
    assert other is not None and other.choices == first.choices
    saved.write_text(saved.read_text().replace("step=1", "stop=1"))
    with pytest.raises(PlanError, match="did you mean 'step'"):
        train(saved, None)
    registry.unregister(Relay)
    try:
        with pytest.raises(PlanError, match=r"no exchange called 'relay'(.|\n)*shoal\.register"):
            train(saved, None)
    finally:
        registry.register(Relay)


def test_ranks_that_registered_other_classes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share one registry, so each look at it says something else here."""
    number = itertools.count()
    monkeypatch.setattr(
        "shoal.front.request.from_outside", lambda _: {"relay": f"copy {next(number)}"}
    )

    def work(comm: ThreadComm) -> None:
        network = nn.Linear(3, 2)
        with using(comm, cluster_of(2)):
            sample = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
            shoal.parallelize(network, F.cross_entropy, sgd(network.parameters()), sample=sample)

    with pytest.raises(RanksDiffer, match="'relay' of its own"):
        run(2, work, timeout_s=60)
