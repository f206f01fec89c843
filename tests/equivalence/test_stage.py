"""The end of a model on hosts of its own: what workers get is what one process gets, and every
wrong use is named.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
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
    integers,
    numbers,
    plain,
    rows_of,
    sgd,
    state,
)
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.faulty import Drop, Fault, FaultyComm
from shoal.comm.stage_output import StageOutput
from shoal.comm.threads import ThreadComm, run
from shoal.comm.traced import TracedComm
from shoal.core.errors import DeadlinePassed, RanksDiffer, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Plan
from shoal.planner.explain import explain
from shoal.planner.timeline import Predictor
from shoal.profiling.identity import trainable_layers
from shoal.report import text
from shoal.rewrite.apply import sites
from shoal.runtime.session import current, using
from shoal.tensors.cut import cut_of

COUNT_BYTES = 32  # a row count that is asked for, to every other rank
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
                assert how["pins"] not in (PINS, None) or any(
                    choice.strategy == "stage" for choice in plan.choices
                )
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
def test_workers_and_a_tail_get_what_one_process_gets(
    workers: int, tail: int, micro_batches: int
) -> None:
    assert_same(built(Net), workers=workers, tail=tail, micro_batches=micro_batches)


SHARED = {
    "cut": {"tail.1": "stage:column_pair", "tail.3": "stage:row_pair", "tail.5": "stage:column"},
    "sliced": {"tail.*": "stage:sliced"},
    "replicated": {"tail.*": "stage:replicate:ring"},
    "by inputs": {"tail.*": "stage:row"},
    "factor": {"tail.*": "stage:factor"},
    "as planned": {"tail.*": "stage"},
}


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "workers,tail,optimizer", [(2, 2, sgd), (3, 2, adamw), (4, 2, adamw), (3, 3, sgd)]
)
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
    """Settings, groups, gradients and values are changed between steps, and all of it is looked
    at.
    """
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


def penalised(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        penalty = sum(0.1 * p.pow(2).sum() for p in model.parameters())
        optimizer.zero_grad()
        (loss_fn(model(x), y) + penalty).backward()
        optimizer.step()


def scaled(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Gradients that are not finite are skipped, by all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (x, y) in enumerate(its):
        optimizer.zero_grad()
        scaler.scale(loss_fn(model(x), y) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def sending_once(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for first, second in zip(its[::2], its[1::2], strict=False):
        optimizer.zero_grad()
        with optimizer.accumulate() if hasattr(optimizer, "accumulate") else nullcontext():
            loss_fn(model(first[0]), first[1]).backward()
        loss_fn(model(second[0]), second[1]).backward()
        optimizer.step()


def by_closure(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def penalised_afterwards(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        (
            loss + sum(0.1 * p.pow(2).sum() + 0.1 * p.abs().sum() for p in model.parameters())
        ).backward()
        sum(0.1 * p.pow(2).sum() for p in model.tail.parameters()).backward()
        optimizer.step()


def attacked(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """A gradient of inputs changes no parameter's; nor does a backward into some of them change the
    others'.
    """
    for x, y in its:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_fn(model(x), y), x)
        x = (x + 0.1 * slope.sign()).detach()
        loss_fn(model(x), y).backward(inputs=[*model.body.parameters(), model.tail[1].weight])
        loss_fn(model(x / 2), y).backward()
        optimizer.step()


def freezing_in_between(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    for x, y in its:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        loss = loss_fn(model(x / 2), y)
        model.tail[3].requires_grad_(False)
        loss.backward()
        model.tail[3].requires_grad_(True)
        optimizer.step()


def counting(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Outputs and losses are looked at when all is done, and kept."""
    kept = []
    for x, y in its:
        output = model(x)
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            kept.append((loss, (output.argmax(1) == y).sum(), loss_fn(output, y), output))
    if isinstance(kept[0][3], StageOutput):
        assert cut_of(model.tail[1].weight).stage.oldest == 1  # as outputs are kept
        kept = [each[:3] for each in kept]
        model(its[0][0])
        assert cut_of(model.tail[1].weight).stage.oldest >= len(its), "losses keep what is over"


def regrouping(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Groups change, before states are loaded and gradients clipped."""
    head = list(model.tail[5].parameters())
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not other for other in head)]
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.add_param_group({"params": head, "lr": 0.01})
    loss_fn(model(its[2][0]), its[2][1]).backward()
    clip = getattr(optimizer, "clip_grad_norm_", None) or (lambda most: clip_of(optimizer, most))
    [float(p.grad.norm()) for p in model.parameters()]
    clip(0.05)
    for parameter in model.parameters():
        parameter.grad.add_(0.01)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain(model, loss_fn, optimizer, its[3:])


def clip_of(optimizer: Any, most: float) -> None:
    torch.nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], most
    )


def setting(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """What modules are told in the middle of training."""
    for step, batch in enumerate(its):
        model.tail[4].negative_slope = 0.1 * step
        plain(model, loss_fn, optimizer, [batch])


LOOPS = [
    penalised_afterwards,
    attacked,
    freezing_in_between,
    counting,
    regrouping,
    setting,
    penalised,
    scaled,
    sending_once,
    by_closure,
    clipping,
    clipping_by_the_optimizer,
    accumulating,
    two_losses,
    two_forwards,
    changing,
    freezing,
    saving,
]


@pytest.mark.parametrize(("tail", "optimizer"), [(1, sgd), (2, adamw)])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_loops_do(loop: Loop, optimizer: Any, tail: int) -> None:
    assert_same(built(Net), loop, optimizer=optimizer, tail=tail)


@pytest.mark.parametrize("workers,tail", [(2, 1), (3, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_a_step_sends_the_bytes_that_are_stated(
    micro_batches: int, workers: int, tail: int
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
            pins = PINS | {"body.*": "replicate:direct"}
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


class Tokens(nn.Module):
    """Rows of tokens in the body, which the tail takes as one dimension, and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.ends = nn.ModuleDict({"pool": Pooled()})

    def forward(self, ids: Tensor) -> Tensor:
        return self.ends["pool"](torch.tanh(self.table(ids)))


class Pooled(nn.Module):
    """Not nn.Sequential: it is an end of the model as a whole, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.frozen = nn.Linear(CLASSES, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.relu(self.head(x))).mean(1)


def tokens() -> list[Batch]:
    return [(integers(7, 12, 3, seed=s), integers(CLASSES, 12, seed=s)) for s in range(5)]


@pytest.mark.parametrize("tail", [1, 2])
def test_the_end_is_a_module_of_any_kind(tail: int) -> None:
    pins = {"table": "replicate", "ends.*": "stage"}
    assert_same(
        built(Tokens),
        given=tokens(),
        pins=pins,
        tail=tail,
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
    )


@pytest.mark.parametrize("pin", ["2", "4", "1[0-9]"])
@pytest.mark.parametrize("tail", [1, 2])
def test_the_end_is_the_last_children_of_a_sequential(tail: int, pin: str) -> None:
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
    more = [
        nn.Linear(HIDDEN, HIDDEN),
        *(nn.Tanh() for _ in range(5)),
        nn.Linear(HIDDEN, CLASSES),
        nn.Dropout(0.0),
    ]
    model = built(lambda: nn.Sequential(*layers, *more))
    assert_same(model, pins={pin: "stage"}, tail=tail, strategies=["replicate", "sliced"])


def by_torch(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Save by torch's checkpoint functions, which make a step where an optimizer seems to have no
    state.
    """
    plain(model, loss_fn, optimizer, its[:2])
    optimizer.zero_grad()
    assert get_optimizer_state_dict(model, optimizer)["state"]
    plain(model, loss_fn, optimizer, its[2:])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_torchs_checkpoint_functions_leave_the_state_of_a_tail_alone(optimizer: Any) -> None:
    model = built(Net)
    model.body.requires_grad_(False)
    assert_same(model, by_torch, optimizer=optimizer, pins={"tail.*": "stage"})


def test_a_body_that_is_frozen() -> None:
    model = built(Net)
    model.body.requires_grad_(False)
    assert_same(model, pins={"tail.*": "stage"})


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize("tail", [1, 2])
def test_a_loss_counts_its_own_terms(tail: int) -> None:
    assert_same(
        built(Net), loss_fn=ignoring, count=lambda output, target: (target != 0).sum(), tail=tail
    )


def looking(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Any:
    """Outputs are looked at, in training and in evaluation."""
    seen = []
    for x, y in its:
        output = model(x)
        seen.append((output.argmax(1) == y).sum())
        loss = loss_fn(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen += [
                loss.clone(),
                loss_fn(model(x), y),
                model(x[:1]).sum(),
                output.shape[1] * output.float().mean(),
            ]
    return torch.stack([each.double() for each in seen])


def test_outputs_are_what_they_are_in_one_process() -> None:
    model, batches = built(Net), features(WIDTH, CLASSES)
    copies = [copy.deepcopy(model) for _ in range(2)]
    _, seen = together(model, looking, workers=2, given=batches)
    for rank in range(2):  # each on its rows, and no gradients exchanged but those of both
        first = looking(
            copies[rank],
            F.cross_entropy,
            sgd(copies[rank].parameters()),
            [rows_of(batches[0], rank, 2)],
        )
        assert torch.allclose(seen[rank][0], first[0]) and torch.allclose(seen[rank][1], first[1])
        assert seen[rank].isfinite().all()


def of_inputs(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Tensor:
    x, y = its[0][0].requires_grad_(), its[0][1]
    loss_fn(model(x), y).backward()
    assert x.grad is not None
    return x.grad


def test_gradients_of_inputs_are_this_ranks_own() -> None:
    model, batch = built(Net), features(WIDTH, CLASSES)[0]
    _, grads = together(model, of_inputs, workers=2)
    for rank in range(2):
        x, y = rows_of(batch, rank, 2)
        F.cross_entropy(model(x.requires_grad_()), y).backward()
        assert torch.allclose(grads[rank], x.grad)


def copied(
    model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]
) -> tuple[Tensor, Tensor, str]:
    plain(model, loss_fn, optimizer, its[:1])
    one = copy.deepcopy(model)
    assert type(one) is Net and type(one.tail) is nn.Sequential
    return one(its[0][0]).detach(), model(its[0][0]).detach().clone(), repr(model)


def test_a_copy_is_an_ordinary_model() -> None:
    _, results = together(built(Net), copied)
    for ours, theirs, said in results:
        assert torch.allclose(ours, theirs)
        assert said == repr(built(Net))


def loaded_before(model: Any, optimizer: Any) -> None:
    plain(model, F.cross_entropy, optimizer, features(WIDTH, CLASSES)[:2])


@pytest.mark.parametrize("tail", [1, 2])
def test_an_optimizer_brings_its_state(tail: int) -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        if not hasattr(optimizer, "accumulate"):
            loaded_before(model, optimizer)
        plain(model, loss_fn, optimizer, its)

    assert_same(built(Net), loop, optimizer=adamw, before=loaded_before, tail=tail)


class Probe(Net):
    """A tail that passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[0] = Stop()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


class Stop(nn.Module):
    """A gradient ends here."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Linked(Net):
    """A tail with one parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[3].bias = self.tail[1].bias


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("make", [Probe, Linked])
def test_tails_of_other_kinds(make: Any, tail: int) -> None:
    assert_same(built(make), tail=tail)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shared", ["cut", "sliced", "by inputs", "factor"])
def test_tail_hosts_some_of_which_have_no_rows(
    shared: str, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.planner.sharing._predicted", lambda plan: plan.joined != joined)
    pins = {"body.*": "replicate"} | SHARED[shared]
    assert_same(built(Net), workers=2, tail=2, uneven=True, micro_batches=8, pins=pins)


@pytest.mark.parametrize("body", ["column", "row"])
def test_a_body_that_is_cut_and_ranks_with_fewer_rows_than_micro_batches(body: str) -> None:
    assert_same(built(Net), uneven=True, pins={"body.*": body, "tail.*": "stage"})


def test_sequences_of_other_lengths_on_every_worker() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        longest = 1 + shoal.world().rank
        plain(model, loss_fn, optimizer, [(ids[:, :longest], y) for ids, y in its])

    _, losses = together(
        built(Tokens), loop, given=tokens(), pins={"table": "replicate", "ends.*": "stage"}
    )
    assert losses == [None] * 3
    with pytest.raises(UsageError, match="of one shape from all workers"):
        together(
            built(Tokens),
            loop,
            workers=4,
            tail=2,
            given=tokens(),
            pins={"table": "replicate", "ends.*": "stage"},
        )


class Summed(nn.Module):
    """Adds up what it makes of each token; zeros add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x)).sum(1)


class Trimmed(nn.Module):
    """Cuts its rows to their longest, so that a worker's micro-batches are of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=0)
        self.ends = nn.ModuleDict({"sum": Summed()})

    def forward(self, ids: Tensor) -> Tensor:
        return self.ends["sum"](self.table(ids[:, : int((ids > 0).sum(1).max())]))


@pytest.mark.parametrize("joined", [True, False])
def test_micro_batches_of_several_lengths_keep_their_order(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.planner.sharing._predicted", lambda plan: plan.joined != joined)
    batches = []
    for seed in range(5):
        ids = 1 + integers(10, 12, 6, seed=seed)
        lengths = [2, 2, 6, 6, 2, 2, 6, 6, 6, 2, 6, 2] if seed else [6] * 12
        batches.append(
            (
                ids.masked_fill(torch.arange(6) >= torch.tensor(lengths)[:, None], 0),
                integers(5, 12, seed=seed),
            )
        )
    pins = {"table": "replicate", "ends.*": "stage"}
    assert_same(built(Trimmed), workers=2, given=batches, pins=pins, micro_batches=3)


def two_optimizers(parameters: Any) -> Any:
    """Of the body, and of the end."""
    every = list(parameters)
    return [sgd(every[:4]), sgd(every[4:])]


def each_clipped_by_itself(model: Any, loss_fn: Any, optimizers: Any, its: list[Batch]) -> None:
    for x, y in its:
        model.zero_grad()
        loss_fn(model(x), y).backward()
        for each in optimizers:
            (each.clip_grad_norm_ if hasattr(each, "clip_grad_norm_") else partial(clip_of, each))(
                0.05
            )
            each.step()


@pytest.mark.parametrize("tail", [1, 2])
def test_an_optimizer_that_has_nothing_at_the_end(tail: int) -> None:
    assert_same(built(Net), each_clipped_by_itself, optimizer=two_optimizers, tail=tail)


def test_a_frozen_model_is_evaluated_with_gradients_switched_on() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        plain(model, loss_fn, optimizer, its[:1])
        model.requires_grad_(False)
        output = model(its[1][0])
        assert output.argmax(1).shape == its[1][1].shape and loss_fn(output, its[1][1]).isfinite()
        model.requires_grad_(True)
        plain(model, loss_fn, optimizer, its[1:])

    assert_same(built(Net), loop)


def test_a_second_model_is_planned_without_tail_hosts() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> list[bool]:
        other = built(Net)
        shoal.parallelize(other, loss_fn, sgd(other.parameters()), sample=its[0])
        attached = current().attached
        return [
            any(layer.tail for layer in attached[each].profile.layers) for each in (model, other)
        ]

    _, offered = together(built(Net), loop)
    assert offered == [[True, False]] * 3


def test_a_scaler_and_a_fused_optimizer() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        scaled(model, loss_fn, optimizer, its[:3])
        plain(model, loss_fn, optimizer, its[3:])

    def fused(parameters: Any) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, fused=True)

    assert_same(built(Net), loop, optimizer=fused)


def fused_sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def test_a_fused_optimizer_meets_no_parameter_without_state_beside_others() -> None:
    assert_same(built(Net), optimizer=fused_sgd)


def rows_of_none(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> Tensor:
    x = its[0][0][: 2 * shoal.world().rank]
    with torch.no_grad():
        return model(x)


def test_a_rank_without_rows_evaluates_beside_the_others() -> None:
    _, outputs = together(built(Net), rows_of_none)
    assert [tuple(output.shape) for output in outputs] == [(0, CLASSES), (2, CLASSES), (4, CLASSES)]


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "another loss": (
        lambda m, loss_fn, o, its: m(its[0][0]).pow(2).mean().backward(),
        "something else than the loss",
    ),
    "twice": (
        lambda m, loss_fn, o, its: twice(loss_fn(m(its[0][0]), its[0][1])),
        "second backward",
    ),
    "by itself": (lambda m, loss_fn, o, its: m.tail(its[0][0]), "called by itself"),
    "in place": (
        lambda m, loss_fn, o, its: m(its[0][0]).mul_(2),
        "mul_ on an output of tail hosts",
    ),
    "an item": (
        lambda m, loss_fn, o, its: m(its[0][0]).__setitem__(0, 1.0),
        "__setitem__ on an output of tail hosts",
    ),
    "a hook": (
        lambda m, loss_fn, o, its: m(its[0][0]).register_hook(print),
        "register_hook on an output",
    ),
    "a target": (
        lambda m, loss_fn, o, its: loss_fn(m(its[0][0]), m(its[0][0])),
        "beside the output that takes a grad",
    ),
    "hooks": (
        lambda m, loss_fn, o, its: hooked(m)(its[0][0]),
        "has a hook, which would not be called",
    ),
    "data": (lambda m, loss_fn, o, its: m.tail[1].weight.data.zero_(), "would not reach the rest"),
}


def hooked(model: Any) -> Any:
    model.tail[3].register_forward_hook(print)
    return model


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_use_is_named(wrong: str) -> None:
    loop, words = WRONG[wrong]
    with pytest.raises(UsageError, match=words):
        together(built(Net), loop)


def alone(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    """Rank 0 evaluates by itself."""
    plain(model, loss_fn, optimizer, its[:1])
    if shoal.world().rank == 0:
        with torch.no_grad():
            model(its[0][0])
    plain(model, loss_fn, optimizer, its[1:])


def test_a_rank_that_does_something_else_is_named() -> None:
    with pytest.raises(
        RanksDiffer, match=r"rank 1 is at .* where rank 0 is at OUTPUT of forward 2"
    ):
        together(built(Net), alone)


class Halved(Net):
    """What the tail puts out is not what the model returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Normed(Net):
    """A tail with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[2] = nn.BatchNorm1d(HIDDEN)


class Turned(Net):
    """Rows are not the first dimension of what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(torch.softmax(x, 0)))


class NormedBody(Net):
    """Statistics of micro-batches would be others."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = nn.BatchNorm1d(HIDDEN)


class Hooked(Net):
    """Somebody looks into its tail."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[1].register_forward_pre_hook(lambda module, args: None)


class Normalising(torch.optim.SGD):
    """Looks at all gradients at once."""

    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        clip = torch.nn.utils.clip_grad_norm_(own, 1.0)
        assert clip.isfinite()
        super().step()


def second(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
    other = built(Net)
    shoal.parallelize(other, loss_fn, sgd(other.parameters()), sample=its[0], pins=PINS)


class Tied(Net):
    """A tail with a parameter of the body's."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[3].bias = self.body[0].bias


class Learning(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target)


SCALE = nn.Parameter(torch.ones((), dtype=torch.float64))
CANNOT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "not the end": (
        Net,
        {"pins": {"body.*": "stage"}},
        "no module that has it puts out what the model returns",
    ),
    "half of it": (
        Net,
        {"pins": {"tail.1": "stage", "tail.3": "replicate"}},
        "stage serves layer tail.1 only beside",
    ),
    "something behind it": (Halved, {}, "no module that has it puts out what the model returns"),
    "buffers": (Normed, {}, "has buffers"),
    "tied": (Tied, {}, "tied to"),
    "a loss that learns": (
        Net,
        {"loss_fn": Learning()},
        "the loss has a trainable parameter that is not the model's",
    ),
    "a loss that reads a parameter": (
        Net,
        {"loss_fn": lambda output, target: F.cross_entropy(output * SCALE, target)},
        "the loss reads parameters itself",
    ),
    "changed by micro-batches": (Turned, {}, "micro_batches=1 does not cut the batch"),
    "normalised in batches": (NormedBody, {}, "micro_batches=1 does not cut the batch"),
    "hooks": (Hooked, {}, "has hooks"),
    "all gradients at once": (
        Net,
        {"optimizer": lambda own: Normalising(own, 0.1)},
        "Normalising updates several",
    ),
    "a second model": (Net, {"loop": second}, "the model that is parallelised first"),
    "its own loss": (Net, {"loss_fn": None}, "loss"),
    "shared by one": (Net, {"pins": {"tail.*": "stage:column"}}, "one tail host shares layer"),
    "shared by what is no way": (
        Net,
        {"pins": {"tail.*": "stage:head"}, "tail": 2},
        "cannot share layer",
    ),
    "shared by nothing there is": (Net, {"pins": {"tail.*": "stage:coloumn"}, "tail": 2}, "column"),
    "no micro-batch": (Net, {"micro_batches": 0}, "micro_batches is a whole number"),
    "no tail hosts": (Net, {"tail": 0}, "there are no tail hosts"),
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_a_tail_says_why(what: str) -> None:
    make, how, words = CANNOT[what]
    with pytest.raises(UsageError, match=words):
        together(built(make), **how)


def faulty(fault: Fault, tail: int = 1) -> None:
    """Two workers and a tail train with a fault."""
    batches, copies = features(WIDTH, CLASSES), [built(Net) for _ in range(2 + tail)]
    cluster = replace(cluster_of(2), tail=tuple(f"tail{t}" for t in range(tail)))

    def work(comm: ThreadComm) -> None:
        model = copies[comm.rank]
        own = [rows_of(batch, comm.rank % 2, 2) for batch in batches]
        state_of = FaultyComm(comm, [])
        with using(state_of, cluster), suppress(SystemExit):
            optimizer = sgd(model.parameters())
            _, loss_fn, _ = shoal.parallelize(
                model, F.cross_entropy, optimizer, sample=own[0], pins=PINS
            )
            plain(model, loss_fn, optimizer, own[:1])
            if comm.rank == fault.rank:
                hosts = cut_of(model.tail[1].weight).stage.hosts
                hosts.comm = FaultyComm(hosts.comm, [fault])
            plain(model, loss_fn, optimizer, own[1:])

    run(2 + tail, work, timeout_s=2, hosts=cluster.topology.hosts + cluster.tail, tail=tail)


def test_a_micro_batch_that_does_not_come_is_named_by_its_key() -> None:
    with pytest.raises(
        DeadlinePassed, match=r"micro-batch [01] of forward 2 has not come from rank 1 within 2 s"
    ):
        faulty(Drop(rank=1, at=4))


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
            rf"rank {worker} \(host\d\) +│ rank {host} \(tail{host - 3}\) +│ +0\.00 MB │ +0\.00 MB",
            said,
        )
