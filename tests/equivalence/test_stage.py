"""The end of a model on hosts of its own: what workers get is what one process gets, and every wrong use is named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    Loop,
    State,
    Training,
    adamw,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    plain,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.comm.traced import TracedComm
from shoal.planner.timeline import Predictor
from shoal.profiling.identity import trainable_layers
from shoal.rewrite.apply import sites
from shoal.runtime.session import using

COUNT_BYTES = 24  # each forward's row count, to every other rank
WIDTH, HIDDEN, CLASSES = 6, 8, 5
PINS = {"body.*": "replicate", "tail.*": "stage"}


class Net(nn.Module):
    """A body, and a tail of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.tail = nn.Sequential(
            nn.ReLU(),
            nn.Linear(WIDTH, HIDDEN),
            nn.Tanh(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


def together(
    model: nn.Module,
    loop: Callable[..., Any] = plain,
    workers: int = 3,
    tail: int = 1,
    *,
    optimizer: Callable[..., Optimizer] = sgd,
    uneven: bool = False,
    given: Sequence[Batch] | None = None,
    loss_fn: Any = F.cross_entropy,
    before: Callable[..., Any] | None = None,
    **how: Any,
) -> tuple[list[State], list[Any]]:
    """States of workers, and what their loops returned."""
    copies = [copy.deepcopy(model) for _ in range(workers + tail)]
    cluster = replace(cluster_of(workers), tail=tuple(f"tail{t}" for t in range(tail)))
    batches = given or features(WIDTH, CLASSES)
    how = {"pins": PINS} | how

    def work(comm: ThreadComm) -> Any:
        mine = copies[comm.rank]
        own = [rows_of(batch, min(comm.rank, workers - 1), workers, uneven) for batch in batches]
        with using(comm, cluster) as session:
            its, its_loss = optimizer(mine.parameters()), copy.deepcopy(loss_fn)
            if before is not None:
                before(mine, its)
            with suppress(SystemExit):
                _, its_loss, _ = shoal.parallelize(mine, its_loss, its, sample=own[0], **how)
                plan = session.attached[mine].plan
                assert any(choice.strategy == "stage" for choice in plan.choices)
                return loop(mine, its_loss, its, own), state(mine)
        assert comm.rank >= workers
        return None, {}

    hosts = cluster.topology.hosts + cluster.tail
    results = run(workers + tail, work, timeout_s=20, hosts=hosts, tail=tail)
    return [r[1] for r in results[:workers]], [r[0] for r in results[:workers]]


def assert_same(model: nn.Module, loop: Loop = plain, within: float = 1e-10, **how: Any) -> None:
    """Workers get what one process gets, with the same bits."""
    expected = Training(
        model=model,
        batches=how.get("given") or features(WIDTH, CLASSES),
        optimizer=how.get("optimizer", sgd),
        loop=loop,
        loss_fn=how.get("loss_fn", F.cross_entropy),
    ).alone()
    got, _ = together(model, loop, **how)
    assert_same_bits(got)
    assert difference(state(model), expected) > 1e-3, "training changed nothing"
    assert difference(expected, got[0]) <= within


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers,tail", [(2, 1), (3, 1), (4, 1)])
def test_workers_and_a_tail_get_what_one_process_gets(workers: int, tail: int, micro_batches: int) -> None:
    assert_same(built(Net), workers=workers, tail=tail, micro_batches=micro_batches)


SHARED = {
    "cut": {"tail.1": "stage:column_pair", "tail.3": "stage:row_pair", "tail.5": "stage:column"},
    "sliced": {"tail.*": "stage:sliced"},
    "replicated": {"tail.*": "stage:replicate:ring"},
    "by inputs": {"tail.*": "stage:row"},
    "factor": {"tail.*": "stage:factor"},
    "as planned": {"tail.*": "stage"},
}


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("workers,tail", [(2, 2), (3, 2), (4, 2), (3, 3)])
def test_tail_hosts_share_the_tail(workers: int, tail: int, shared: str, optimizer: Any) -> None:
    pins = {"body.*": "replicate"} | SHARED[shared]
    assert_same(built(Net), workers=workers, tail=tail, pins=pins, optimizer=optimizer)


@pytest.mark.parametrize("body", ["sliced", "factor", "column", "row"])
def test_the_body_is_served_in_any_way(body: str) -> None:
    assert_same(built(Net), pins={"body.*": body, "tail.*": "stage"})


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_uneven_rows_are_weighted(micro_batches: int, tail: int) -> None:
    assert_same(built(Net), uneven=True, micro_batches=micro_batches, tail=tail)


def clipping(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def clipping_by_the_optimizer(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.1)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def accumulating(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad(set_to_none=False)
        loss_fn(model(first[0]), first[1]).backward()
        (loss_fn(model(second[0]), second[1]) / 2).backward()
        optimizer.step()


def two_losses(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        output = model(x)
        loss = 0.3 * loss_fn(output, y) + 0.7 * loss_fn(output, (y + 1) % CLASSES)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def two_forwards(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        one, other = model(x), model(x * 2)
        optimizer.zero_grad()
        (loss_fn(one, y) + loss_fn(other, y)).backward()
        optimizer.step()


def changing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Settings, groups, gradients and values are changed between steps, and all of it is looked at."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step, (x, y) in enumerate(its):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
            if step % 2:
                parameter.grad = parameter.grad * 2
        optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(x[:3]).sum()
            for parameter in model.parameters():
                parameter.mul_(0.9).clamp_(-2, 2)
        model.train()


def freezing(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for step, (x, y) in enumerate(its):
        for parameter in model.tail[3].parameters():
            parameter.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def saving(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Everything goes back to what it was after two steps, and on from there."""
    plain(model, loss_fn, optimizer, its[:2])
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain(model, loss_fn, optimizer, its[2:4])
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    plain(model, loss_fn, optimizer, its[4:])


LOOPS = [
    clipping,
    clipping_by_the_optimizer,
    accumulating,
    two_losses,
    two_forwards,
    changing,
    freezing,
    saving,
]


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_loops_do(loop: Loop, optimizer: Any, tail: int) -> None:
    assert_same(built(Net), loop, optimizer=optimizer, tail=tail)


@pytest.mark.parametrize("workers,tail", [(2, 1), (3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_a_step_sends_the_bytes_that_are_stated(micro_batches: int, workers: int, tail: int) -> None:
    """Those of the workers, but for the optimizer's settings, which one of each tail host's workers sends."""
    cluster = replace(cluster_of(workers), tail=tuple(f"tail{t}" for t in range(tail)))
    copies, (batch, *_) = [built(Net) for _ in range(workers + tail)], features(WIDTH, CLASSES)

    def work(comm: ThreadComm) -> Any:
        traced, mine = TracedComm(comm), copies[comm.rank]
        x, y = rows_of(batch, min(comm.rank, workers - 1), workers)
        with using(traced, cluster) as session, suppress(SystemExit):
            optimizer = sgd(mine.parameters())
            pins = PINS | {"body.*": "replicate:direct"}
            _, loss_fn, _ = shoal.parallelize(
                mine, F.cross_entropy, optimizer, sample=(x, y), pins=pins, micro_batches=micro_batches
            )
            attached = session.attached[mine]
            counts = [traced.counts.bytes_sent, traced.counts.bytes_received, traced.counts.bytes_leaving]
            plain(mine, loss_fn, optimizer, [(x, y)])
            after = [traced.counts.bytes_sent, traced.counts.bytes_received, traced.counts.bytes_leaving]
            predictor = Predictor(attached.profile, attached.cluster)
            layers = {layer.name: layer for layer in trainable_layers(mine)}
            costs = [predictor.cost(site).traffic for site in sites(attached.plan, layers)]
            apart = workers - attached.cluster.topology.hosts.count(attached.cluster.topology.hosts[comm.rank])
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
