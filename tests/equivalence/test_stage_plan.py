"""The plan of a model whose end runs on hosts of its own: when it is chosen, stated, saved."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    built,
    cluster_of,
    features,
    integers,
    numbers,
    plain,
    rows_of,
    sgd,
)
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from with_tail import (
    CLASSES,
    WIDTH,
    Net,
    assert_same,
    together,
)

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Plan
from shoal.front import text
from shoal.front.session_start import using
from shoal.planner.explain import explain
from shoal.planner.timeline import Predictor
from shoal.profiling.identity import trainable_layers
from shoal.profiling.tails import tail_of
from shoal.rewrite.apply import sites
from shoal.session.session import current
from shoal_tools.testing.byte_counts import TracedComm

COUNT_BYTES = 40  # a row count that is asked for, to every other rank


@pytest.mark.parametrize(
    "workers,tail,codec",
    [(2, 1, ""), (3, 1, ""), (3, 2, ""), (4, 2, ""), (2, 1, "+bfloat16"), (4, 2, "+float16")],
)
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_a_step_sends_the_bytes_that_are_stated(
    micro_batches: int, workers: int, tail: int, codec: str
) -> None:
    """Those of the workers, but for the optimizer's settings, which one of each tail host's workers
    sends.
    """
    cluster = replace(cluster_of(workers), tail=tuple(f"tail{t}" for t in range(tail)))
    copies, (batch, *_) = [built(Net) for _ in range(workers + tail)], features(WIDTH, CLASSES)

    def work(comm: ThreadComm) -> Any:
        traced, mine = TracedComm(comm), copies[comm.rank]
        x, y = rows_of(batch, min(comm.rank, workers - 1), workers)
        with using(traced, cluster) as session, suppress(SystemExit):
            optimizer = sgd(mine.parameters())
            pins = {"body.*": "replicate:direct", "tail.*": f"stage{codec}"}
            _, loss_fn, _ = shoal.parallelize(
                mine,
                F.cross_entropy,
                optimizer,
                sample=(x, y),
                pins=pins,
                micro_batches=micro_batches,
            )
            attached = session.attached[mine]
            counts = [
                traced.counts.bytes_sent,
                traced.counts.bytes_received,
                traced.counts.bytes_leaving,
            ]
            plain(mine, loss_fn, optimizer, [(x, y)])
            after = [
                traced.counts.bytes_sent,
                traced.counts.bytes_received,
                traced.counts.bytes_leaving,
            ]
            predictor = Predictor(attached.profile, attached.cluster)
            layers = {layer.name: layer for layer in trainable_layers(mine)}
            costs = [predictor.cost(site).traffic for site in sites(attached.plan, layers)]
            apart = workers - attached.cluster.topology.hosts.count(
                attached.cluster.topology.hosts[comm.rank]
            )
            stated = [
                sum(t.sent[comm.rank] for t in costs) + COUNT_BYTES * (workers - 1),
                sum(t.received[comm.rank] for t in costs) + COUNT_BYTES * (workers - 1),
                sum((t.leaving or t.sent)[comm.rank] for t in costs) + COUNT_BYTES * apart,
            ]
            return [b - a for a, b in zip(counts, after, strict=True)], stated
        return None

    hosts = cluster.topology.hosts + cluster.tail
    results = run(workers + tail, work, timeout_s=20, hosts=hosts, tail=tail)
    for rank, (counted, stated) in enumerate(results[:workers]):
        if rank < tail:
            assert 0 < counted[0] - stated[0] < 2000
            counted[0], counted[2] = stated[0], stated[2]
        assert counted == stated


def test_a_second_model_is_planned_without_tail_hosts() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> list[bool]:
        other = built(Net)
        shoal.parallelize(other, loss_fn, sgd(other.parameters()), sample=its[0])
        attached = current().attached
        return [tail_of(attached[each].profile.layers) is not None for each in (model, other)]

    _, offered = together(built(Net), loop)
    assert offered == [[True, False]] * 3


def test_a_stage_is_planned_where_it_pays() -> None:
    """Wide layers behind a narrow body, over slow links: whatever workers do among themselves takes
    longer.
    """
    wide = 700

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, wide)
        )

    model = built(make, torch.float32)
    batch = numbers(12, WIDTH, dtype=torch.float32), integers(wide, 12)
    link = Link(latency_s=1e-4, bytes_per_s=1e6)
    hosts = Topology(("a", "b", "c"))
    how = {"sample": batch, "strategies": ["replicate", "stage"]}
    args = model, F.cross_entropy, sgd(model.parameters())
    planned = shoal.plan(*args, cluster=Cluster(hosts, link, 2.0, tail=("d",)), **how)
    assert [choice.strategy for choice in planned.choices] == ["stage", "stage", "replicate"]
    without = shoal.plan(*args, cluster=Cluster(hosts, link, 2.0), **how)
    assert planned.predicted_s < without.predicted_s / 3


@pytest.mark.parametrize("joined", [True, False])
def test_a_plan_is_saved_edited_and_given_back(joined: bool, tmp_path: Path) -> None:
    plans: list[Plan] = []

    def keep(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        plans.append(current().attached[model].plan)

    together(built(Net), keep, tail=2, micro_batches=3)
    choices = [replace(c, exchange="row") if c.layer == "tail.3" else c for c in plans[0].choices]
    replace(plans[0], choices=tuple(choices), joined=joined).save(tmp_path / "plan.json")
    given = Plan.load(tmp_path / "plan.json")
    assert (given.joined, given.micro_batches) == (joined, 3)
    assert_same(built(Net), tail=2, pins=None, plan=given)


def test_the_plan_says_who_sends_what_to_whom() -> None:
    def keep(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> str:
        attached = current().attached[model]
        console = Console(width=200, file=io.StringIO())
        console.print(
            text.explained(
                explain(attached.plan, attached.profile, attached.cluster, alternatives=False)
            )
        )
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    _, (said, *_) = together(built(Net), keep, workers=3, tail=2)
    assert "the end of the model, tail.1, tail.3, tail.5: 4 micro-batches a step" in said
    for worker, host in enumerate((3, 4, 3)):
        assert re.search(
            rf"rank {worker} \(host\d\) +rank {host} \(tail{host - 3}\) +0\.00 MB +0\.00 MB",
            said,
        )
