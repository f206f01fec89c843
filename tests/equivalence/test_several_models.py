"""Several models: side by side, one after another, and copies of a parallelised one."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections import Counter

import pytest
import torch
from one_process import (
    BUCKETED,
    CUTS,
    DEVICE,
    EVERY_RANK,
    Training,
    adamw,
    assert_same,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    features,
    integers,
    mlp,
    numbers,
    on_threads,
    plain,
    rows_of,
    servers_of,
    sgd,
    state,
    with_options,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import PlanError
from shoal.front.session_start import using

WAY = pytest.mark.parametrize("way", EVERY_RANK)


class Gan(nn.Module):
    """Two models which are parallelised each for itself, and trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7))
        self.judge = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))


def versus(make, judge, makes, judges, batches, freeze):
    """The ordinary steps of a GAN; it may freeze the judge while the maker learns."""
    for noise, real in batches:
        fake = make(noise)
        judges.zero_grad()
        right, wrong = judge(real), judge(fake.detach())
        (F.softplus(-right).mean() + F.softplus(wrong).mean()).backward()
        judges.step()
        judge.requires_grad_(not freeze)
        makes.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        makes.step()
        judge.requires_grad_(True)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@WAY
def test_two_models_side_by_side(way, uneven, freeze):
    gan, ranks = built(Gan), 3
    pin, options = with_options(way)
    pins = {"*": BUCKETED[0], "0" if pin in CUTS else "*": pin}
    servers = servers_of(way, ranks)
    batches = [(numbers(12, 4, seed=s), numbers(12, 7, seed=s + 30)) for s in range(5)]
    copies = [copy.deepcopy(gan) for _ in range(ranks)]
    alone = copy.deepcopy(gan)
    versus(
        alone.make,
        alone.judge,
        adamw(alone.make.parameters()),
        sgd(alone.judge.parameters()),
        batches,
        freeze,
    )

    def work(comm: ThreadComm) -> dict[str, Tensor]:
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        make, judge = copies[comm.rank].make, copies[comm.rank].judge
        with using(comm, cluster_of(ranks, servers)):
            plain = {"loss_fn": lambda out, _: out.square().mean(), "pins": pins} | options
            make, _, makes = shoal.parallelize(
                make, optimizer=adamw(make.parameters()), sample=(mine[0][0], 0), **plain
            )
            judge, _, judges = shoal.parallelize(
                judge, optimizer=sgd(judge.parameters()), sample=(mine[0][1], 0), **plain
            )
            versus(make, judge, makes, judges, mine, freeze)
        return state(copies[comm.rank])

    got = on_threads(ranks, work, servers)
    assert_same_bits(got)
    assert difference(alone.state_dict(), got[0]) <= 1e-10


class Looking(nn.Module):
    """Every kind of layer that a strategy may rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 5, bias=False),
            nn.Linear(5, 3),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids)))).mean(1)


def looked_up() -> list[tuple[Tensor, Tensor]]:
    return [(integers(11, 12, 5, seed=s), integers(3, 12, seed=s + 9)) for s in range(5)]


def assert_same_gradients(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@WAY
def test_a_copy_is_an_ordinary_model(way, copied):
    """It runs on one rank alone, has torch's own layers, leaves the original alone, and can be
    parallelised anew.
    """

    def loop(model, loss_fn, optimizer, batches):
        (x, y), *rest = batches
        loss_fn(model(x), y).backward()
        optimizer.step()
        if copied == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        trained = model.state_dict()
        if shoal.world().rank == 0:
            assert [type(m) for m in twin.modules()] == [
                Looking,
                nn.Embedding,
                nn.Linear,
                nn.Linear,
            ]
            ordinary = Looking().to(DEVICE, torch.float64)
            ordinary.load_state_dict(trained)
            for each in (twin, ordinary):
                each(x).square().sum().backward()
            assert_same_gradients(twin, ordinary)
            sgd(twin.parameters()).step()
        for x, y in rest:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(Training(model=built(Looking), batches=looked_up(), loop=loop), 2, way)


@WAY
def test_a_copy_parallelised_anew(way):
    first = Training(model=built(Looking), batches=looked_up())
    copies: list[nn.Module] = []

    def loop(model, loss_fn, optimizer, batches):
        copies.append(copy.deepcopy(model))

    Training(model=first.model, batches=first.batches, loop=loop).on_ranks(2, way)
    assert_same(Training(model=copies[0], batches=looked_up()), 2, way)


_collecting = threading.Lock()


def collect() -> None:
    """Collect what is gone; while another thread collects, Python's own does nothing."""
    with _collecting:
        gc.collect()


@pytest.fixture
def counted(monkeypatch) -> tuple[Counter[str], Counter[str]]:
    """Channels that were opened, and those that were closed, by their names."""
    opened, closed = Counter[str](), Counter[str]()
    channel, close = ThreadComm.channel, ThreadComm.close

    def opening(comm: ThreadComm, name: str, **how: object) -> ThreadComm:
        its = channel(comm, name, **how)
        vars(its)["its_name"] = name
        opened[name] += 1
        return its

    def closing(comm: ThreadComm) -> None:
        closed[vars(comm).get("its_name", "")] += 1
        close(comm)

    monkeypatch.setattr(ThreadComm, "channel", opening)
    monkeypatch.setattr(ThreadComm, "close", closing)
    return opened, closed


def test_models_one_after_another_leave_no_threads_and_no_channels(counted):
    """As in cross-validation; rank 0 keeps the second model longer than the others do."""
    opened, closed = counted
    models = [[built(mlp) for _ in range(4)] for _ in range(2)]

    def work(comm):
        kept = []
        with using(comm, cluster_of(2)) as session:
            for fold in range(4):
                model, mine = (
                    models[comm.rank].pop(),
                    [rows_of(batch, comm.rank, 2) for batch in features(7, 3)],
                )
                optimizer = sgd(model.parameters())
                pins = {"*": "sliced", "2": "column"}
                shoal.parallelize(model, F.cross_entropy, optimizer, sample=mine[0], pins=pins)
                plain(model, F.cross_entropy, optimizer, mine)
                if fold == 1 and comm.rank == 0:
                    kept.append(model)
                del model, optimizer
                collect()
            return set(session.threads), len(kept)

    assert on_threads(2, work) == [({1, 3}, 1), ({1, 3}, 0)]
    for fold in (0, 2):
        mine = {name for name in opened if name.startswith(f"model{fold}-")}
        assert {f"model{fold}-{which}" for which in ("boundary", "counts", "lane0")} <= mine
        assert all(closed[name] == opened[name] for name in mine)


def test_a_plan_that_is_refused_leaves_no_channels(counted, monkeypatch):
    """Before the rewrite, by the planner; and while the model is rewritten."""
    models = [[built(mlp) for _ in range(2)] for _ in range(2)]

    def refuse(*_: object) -> None:
        raise PlanError("no layer is served today")

    def work(comm: ThreadComm) -> list[str]:
        batch, heard = rows_of(features(7, 1)[0], comm.rank, 2), []
        with using(comm, cluster_of(2)):
            for model, pin in zip(models[comm.rank], ("embedding", "sliced"), strict=True):
                pins = {"0": "column", "2": pin}
                try:
                    shoal.parallelize(
                        model, F.cross_entropy, sgd(model.parameters()), sample=batch, pins=pins
                    )
                except PlanError as error:
                    heard.append(str(error))
        return heard

    monkeypatch.setattr("shoal.session.attach.apply", refuse)
    for heard in on_threads(2, work):
        assert "embedding cannot serve layer 2" in heard[0]
        assert "no layer is served today" in heard[1]
    opened, closed = counted
    left = {name for name in opened if closed[name] != opened[name]}
    assert "model0-boundary" in opened and not {name for name in left if "model" in name}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("replicate", marks=pytest.mark.slow),
        pytest.param("column", marks=pytest.mark.slow),
        "sliced",
        pytest.param("factor", marks=pytest.mark.minutes),
    ],
)
def test_models_that_are_gone_hold_no_memory(way: str) -> None:
    models = [[built(mlp) for _ in range(3)] for _ in range(2)]

    def work(comm: ThreadComm) -> int:
        batches = [rows_of(batch, comm.rank, 2) for batch in features(7, 3)]
        with using(comm, cluster_of(2)) as session:
            for model in models[comm.rank]:
                optimizer = sgd(model.parameters())
                shoal.parallelize(
                    model,
                    F.cross_entropy,
                    optimizer,
                    sample=batches[0],
                    pins={"*": "replicate", "2": way},
                )
                plain(model, F.cross_entropy, optimizer, batches)
            models[comm.rank].clear()
            del model, optimizer
            collect()
            session.end_dropped_models()
            collect()
            return len(session.passes.waits)

    assert on_threads(2, work) == [0, 0]
