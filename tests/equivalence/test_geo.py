"""Local steps at servers (geo-SGD): as plain renderings of the algorithm have it.

ranks     shoal: each worker steps on its rows, pushes how far it has gone every H steps, and pulls
plain     one process with a model and an optimizer for each worker, and the global weights
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
import torch
from locally import adamw, net, sgd, with_norm
from one_process import (
    SMALL,
    Batch,
    State,
    assert_same_bits,
    call,
    cluster_of,
    difference,
    features,
    numbers,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.strategy import Place
from shoal.core.errors import PlanError, UsageError
from shoal.core.outer_step import Outer
from shoal.core.plan import Plan
from shoal.front.session_start import using
from shoal.servers.geo import GeoModel, GlobalSlice
from shoal.servers.servers import serve
from shoal.strategies.geo import GeoTransfer
from shoal_tools.testing.byte_counts import TracedComm

STEPS, ROUND = 8, 3  # the last round is not full
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass
class Plain:
    """The algorithm for N workers in one process; they push in turns, or all as one."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    in_turns: bool
    lag: int = 0
    lr: float = 1.0
    old: list[list[Tensor]] = field(init=False)  # as each worker saw the global weights last
    weights: list[Tensor] = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.weights = [p.detach().clone() for p in self.models[0].parameters()]
        self.old = [[w.clone() for w in self.weights] for _ in self.models]

    def step(self, batches: Sequence[Batch]) -> None:
        for model, optimizer, (x, y) in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(call(model, x), y).backward()
            optimizer.step()
        self.steps += 1
        if self.steps % ROUND == 0:
            self.push()
        if self.steps >= ROUND and self.steps % ROUND == self.lag:
            self.take_over()

    @torch.no_grad()
    def push(self) -> None:
        n = len(self.models)
        self.pushed = [[p.detach().clone() for p in m.parameters()] for m in self.models]
        self.given: list[list[Tensor]] = []
        whole = [torch.zeros_like(w) for w in self.weights]
        for pushed, old in zip(self.pushed, self.old, strict=True):
            for total, p, o in zip(whole, pushed, old, strict=True):
                total += self.lr * (p - o) / n
            if self.in_turns:
                for w, total in zip(self.weights, whole, strict=True):
                    w += total
                    total.zero_()
                self.given.append([w.clone() for w in self.weights])
        if not self.in_turns:
            for w, total in zip(self.weights, whole, strict=True):
                w += total
            self.given = [[w.clone() for w in self.weights] for _ in self.models]

    @torch.no_grad()
    def take_over(self) -> None:
        self.old = self.given
        for model, given, pushed in zip(self.models, self.given, self.pushed, strict=True):
            for p, new, before in zip(model.parameters(), given, pushed, strict=True):
                p.add_(new - before)


def plain(
    make: Make,
    workers: int,
    batches: Sequence[Batch],
    *,
    in_turns: bool = False,
    uneven: bool = False,
    **how: Any,
) -> Plain:
    models = [net() for _ in range(workers)]
    expected = Plain(models, [make(m.parameters()) for m in models], in_turns, **how)
    for batch in batches:
        expected.step([rows_of(batch, rank, workers, uneven) for rank in range(workers)])
    return expected


def on_ranks(
    work: Callable[[ThreadComm, nn.Module], Any],
    workers: int,
    servers: int = 2,
    models: Sequence[nn.Module] | None = None,
) -> list[Any]:
    """What `work` returns on each worker, and what the servers have observed."""
    models = models or [net() for _ in range(workers)]
    cluster = cluster_of(workers, servers)

    def train_or_serve(comm: ThreadComm) -> Any:
        if comm.rank >= workers:
            return serve(comm)
        with using(comm, cluster):
            return work(comm, models[comm.rank])

    hosts = cluster.topology.hosts + cluster.servers
    return run(workers + servers, train_or_serve, timeout_s=20, hosts=hosts, servers=servers)


def spread(model: nn.Module, make: Make, sample: Batch, **options: Any) -> tuple[Any, Any, Any]:
    """A parallelised model, in small buckets: large layers are in several."""
    options = {"local_steps": ROUND, "search_options": SMALL} | options
    return shoal.parallelize(
        model, F.cross_entropy, make(model.parameters()), sample=sample, **options
    )


def train(model: nn.Module, loss_fn: Any, optimizer: Optimizer, batches: Iterable[Batch]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(call(model, x), y).backward()
        optimizer.step()


def trained(
    make: Make, workers: int, batches: Sequence[Batch], *, uneven: bool = False, **options: Any
) -> tuple[list[State], list[State]]:
    """Each worker's own state, and the global weights as it has seen them last."""

    def work(comm: ThreadComm, model: nn.Module) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, workers, uneven) for batch in batches]
        train(*spread(model, make, mine[0], **options), mine)
        own = state(model)
        with shoal.global_weights(model):
            return own, state(model)

    own, common = zip(*on_ranks(work, workers)[:workers], strict=True)
    return list(own), list(common)


@pytest.mark.parametrize(("make", "staleness"), [(sgd, None), (adamw, 0)])
def test_one_worker_makes_plain_steps(make: Make, staleness: int | None) -> None:
    batches = features(6, 4, steps=STEPS)
    alone = net()
    train(alone, F.cross_entropy, make(alone.parameters()), batches)
    for lag in (0, 2):
        own, _ = trained(
            make, 1, batches, staleness=staleness, outer=Outer(rule="average", lag=lag)
        )
        assert difference(state(alone), own[0]) <= 1e-10


@pytest.mark.parametrize(
    ("workers", "make"),
    [(2, adamw), *(pytest.param(n, sgd, marks=pytest.mark.slow) for n in (2, 3, 4))],
)
def test_workers_that_keep_step_push_as_one(workers: int, make: Make) -> None:
    batches = features(6, 4, steps=STEPS)
    expected = plain(make, workers, batches, uneven=True)
    own, common = trained(make, workers, batches, uneven=True)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10
    names = dict(net().named_parameters())
    assert difference(dict(zip(names, expected.weights, strict=True)), common[0]) <= 1e-10
    assert difference(own[0], own[1]) > 1e-3, "workers did not step by themselves"


@pytest.mark.slow
def test_with_a_lag_and_a_rate() -> None:
    batches, outer = features(6, 4, steps=STEPS), Outer(rule="average", lr=0.5, lag=1)
    expected = plain(sgd, 3, batches, lag=1, lr=0.5)
    # one bucket: several would take turns
    own, common = trained(sgd, 3, batches, outer=outer, search_options=shoal.SearchOptions())
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10


@pytest.mark.parametrize("workers", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_without_a_bound_each_push_is_added_as_it_comes(workers: int) -> None:
    """A barrier in the loop lets workers push one after the other, in order."""
    batches, barrier = features(6, 4, steps=STEPS), Barrier(workers, timeout=20)
    expected = plain(sgd, workers, batches, in_turns=True)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, workers) for batch in batches]
        model, loss_fn, optimizer = spread(model, sgd, mine[0], staleness=None)
        for x, y in mine:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            for turn in range(workers):
                if turn == comm.rank:
                    optimizer.step()
                barrier.wait()
        return state(model)

    *own, first, second = on_ranks(work, workers)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10
    assert first and second, "servers have observed nothing"


def test_nobody_waits_for_a_worker_that_has_not_begun() -> None:
    """Worker 0 makes all of its steps before worker 1 makes its first."""
    batches, barrier = features(6, 4, steps=STEPS), Barrier(2, timeout=20)

    def work(comm: ThreadComm, model: nn.Module) -> None:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        parts = spread(model, sgd, mine[0], staleness=None)
        if comm.rank == 1:
            barrier.wait()
        train(*parts, mine)
        if comm.rank == 0:
            barrier.wait()

    _, _, *observed = on_ranks(work, 2)
    for (histogram,) in observed:
        assert set(histogram) <= {0, 1, 2}
        assert histogram[2], "in its second round worker 0 was two ahead"


def test_a_bound_holds_a_worker_back() -> None:
    weights = GlobalSlice(torch.zeros(3), 2, 1)
    ones = torch.ones(3)
    assert torch.equal(weights.push(0, ones.clone(), lambda: None), torch.zeros(3))
    assert torch.equal(weights.push(1, 2 * ones, lambda: None), 3 * ones)
    assert torch.equal(weights.look(), 3 * ones)
    weights.push(0, ones.clone(), lambda: None)
    weights.leave(1)
    assert torch.equal(weights.look(), 4 * ones), "the one that is left waits for nobody"


def test_weights_of_16_bits_are_added_up_in_32() -> None:
    weights = GlobalSlice(torch.ones(1, dtype=torch.bfloat16), 1, None)
    for _ in range(64):
        got = weights.push(0, torch.full((1,), 1 / 1024, dtype=torch.bfloat16), lambda: None)
    assert got.dtype == torch.bfloat16
    assert float(got) == 1 + 64 / 1024


@pytest.mark.parametrize("staleness", [None, 0])
def test_a_checkpoint_is_one_moment(staleness: int | None, tmp_path: Path) -> None:
    """It has the servers' weights; another number of workers goes on from them."""
    batches = features(6, 4, steps=STEPS)

    def first(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 3, True) for batch in batches]
        model, loss_fn, optimizer = spread(model, adamw, mine[0], staleness=staleness)
        train(model, loss_fn, optimizer, mine)
        own = state(model)
        shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
        assert_same_bits([own, state(model)])
        shoal.unparallelize(model)
        return state(model)

    given_back, loaded = on_ranks(first, 3)[:3], net()
    with using(ThreadComm()):
        shoal.load(tmp_path / "saved", model=loaded)
    assert_same_bits([state(loaded), *given_back])
    if staleness == 0:
        expected = plain(adamw, 3, batches, uneven=True)
        names = dict(loaded.named_parameters())
        assert difference(dict(zip(names, expected.weights, strict=True)), state(loaded)) <= 1e-10

    def second(comm: ThreadComm, model: nn.Module) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        model, loss_fn, optimizer = spread(model, adamw, mine[0], staleness=staleness)
        train(model, loss_fn, optimizer, mine[:ROUND])
        shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
        begun = state(model)
        with shoal.global_weights(model):
            assert_same_bits([begun, state(model)])
        shoal.save(tmp_path / "again", model=model)
        train(model, loss_fn, optimizer, mine[:ROUND])
        return begun, state(model)

    (begun, own), (other, _) = on_ranks(second, 2)[:2]
    assert_same_bits([state(loaded), begun, other])
    assert difference(begun, own) > 1e-3
    with using(ThreadComm()):
        again = net()
        shoal.load(tmp_path / "again", model=again)
    assert_same_bits([begun, state(again)])


def test_what_is_under_way_is_in_a_checkpoint(tmp_path: Path) -> None:
    """Pushed at the third step, to be taken over at the fifth, saved at the fourth."""
    batches, outer = features(6, 4, steps=5), Outer(rule="average", lag=2)
    expected = plain(sgd, 2, batches, lag=2)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        parts = spread(model, sgd, mine[0], outer=outer, search_options=shoal.SearchOptions())
        train(*parts, mine[:4])
        shoal.save(tmp_path / "saved", model=model)
        train(*parts, mine[4:])
        return state(model)

    own = on_ranks(work, 2)[:2]
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10
    with using(ThreadComm()):
        loaded = net()
        shoal.load(tmp_path / "saved", model=loaded)
    names = dict(loaded.named_parameters())
    assert difference(dict(zip(names, expected.weights, strict=True)), state(loaded)) <= 1e-10


@pytest.mark.slow
def test_exact_steps_at_servers_follow() -> None:
    """Servers forget the weights, and own the parameters of the same model then."""
    batches = features(6, 4, steps=4)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        model, loss_fn, optimizer = spread(model, sgd, mine[0], staleness=None)
        train(model, loss_fn, optimizer, mine)
        shoal.unparallelize(model)
        anew = sgd(model.parameters())  # as moments differ between workers
        model, loss_fn, optimizer = shoal.parallelize(
            model, F.cross_entropy, anew, sample=mine[0], pins={"*": "server"}
        )
        train(model, loss_fn, optimizer, mine)
        return state(model)

    assert_same_bits(on_ranks(work, 2)[:2])


@pytest.mark.slow
def test_buffers_agree_where_workers_keep_step() -> None:
    models = [with_norm() for _ in range(2)]
    batches = features(6, 4, steps=ROUND)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        train(*spread(model, sgd, mine[0]), mine)
        return state(model)

    assert_same_bits(on_ranks(work, 2, models=models)[:2])
    with pytest.raises(PlanError, match='buffers="local"'):
        on_ranks(
            lambda comm, model: spread(model, sgd, batches[comm.rank], staleness=None),
            2,
            models=[with_norm() for _ in range(2)],
        )


def test_bytes_are_those_of_all_weights_up_and_down() -> None:
    """And 64 to each server that has a slice: here one element for three servers."""
    for numel, asked in ((10, 3), (1, 1)):

        def work(comm: ThreadComm, numel: int = numel, asked: int = asked) -> None:
            traced = TracedComm(comm)
            if comm.rank:
                slices = torch.tensor_split(torch.zeros(numel), 3)
                model = GeoModel([slices[comm.rank - 1]], [traced], None)
                model.finish(lambda: None)
                return
            p = nn.Parameter(numbers(numel, dtype=torch.float32).cpu())
            place = Place(layers={}, parameters={"w": p}, rank=0, ranks=1, servers=3)
            transfer = GeoTransfer(place.parameters, place, "w", Outer(rule="average"))
            transfer.number = 0
            transfer.pack(cast(Any, None))  # it asks nothing of the round
            transfer.run(traced)
            transfer.publish()
            sent = replace(traced.counts)
            transfer.farewell(traced)
            assert sent.bytes_sent == 4 * numel + 64 * asked
            assert sent.bytes_received == 4 * numel

        run(4, work, timeout_s=20, hosts=("a", "b", "c", "d"), servers=3)


def test_the_plan_says_it_and_is_taken_again() -> None:
    batches = features(6, 4, steps=4)

    def made(comm: ThreadComm, model: nn.Module) -> tuple[str, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        train(*spread(model, sgd, mine[0], local_steps="auto"), mine)
        plan = shoal.plan_of(model)
        assert plan is not None and plan.outer is not None
        assert {choice.way for choice in plan.choices} == {"server:direct"}
        assert plan.outer.rule == "average"
        assert plan.predicted_s > 0
        return plan.to_json(), state(model)

    (written, own), (_, other) = on_ranks(made, 2)[:2]

    def again(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in batches]
        model, loss_fn, optimizer = shoal.parallelize(
            model,
            F.cross_entropy,
            sgd(model.parameters()),
            sample=mine[0],
            plan=Plan.from_json(written),
        )
        train(model, loss_fn, optimizer, mine)
        return state(model)

    for before, after in zip((own, other), on_ranks(again, 2)[:2], strict=True):
        assert_same_bits([before, after])


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "islands": ({"outer": Outer(rule="average", islands=True)}, PlanError, "pushes by itself"),
    "a quorum": ({"outer": Outer(rule="average", quorum=0.5)}, PlanError, "pushes by itself"),
    "another strategy": ({"pins": {"*": "replicate"}}, PlanError, "weights of every layer"),
    "rows of tables": ({"pins": {"0": "server_rows"}}, PlanError, "weights of every layer"),
    "a codec": ({"pins": {"*": "server:direct+int8"}}, PlanError, "weights of every layer"),
    "strategies": ({"strategies": ["sliced"]}, PlanError, "weights of every layer"),
    "momentum": ({"outer": Outer()}, PlanError, 'rule="average"'),
    "a placement": ({"placement": {"*": 2}}, PlanError, "equal share"),
    "a count": ({"count": lambda output, y: 1.0}, UsageError, "leave out count"),
    "a staleness of half a round": ({"staleness": 0.5}, UsageError, "number of steps"),
    "H of 0": ({"local_steps": 0}, UsageError, "at least 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    options, error, said = BAD[case]

    def work(comm: ThreadComm, model: nn.Module) -> str:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with pytest.raises(Exception) as caught:
            spread(model, sgd, (x, y), **options)
        assert isinstance(caught.value, error), caught.value
        return str(caught.value)

    for message in on_ranks(work, 2, 1)[:2]:
        assert said in message, message


def test_a_plan_of_other_ways_is_refused() -> None:
    def work(comm: ThreadComm, model: nn.Module) -> None:
        sample = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        spread(copies[comm.rank], sgd, sample)
        plan = shoal.plan_of(copies[comm.rank])
        assert plan is not None
        for wrong, said in (
            (replace(plan, outer=Outer()), "no other outer rule"),
            (replace(plan, outer=Outer(rule="average", warmup_steps=3)), "pushes by itself"),
            (replace(plan, outer=Outer(rule="average", grows=True)), "rounds of one length"),
            (replace(plan, placement="hash"), "equal share"),
            (plan.with_choice(replace(plan.choices[0], strategy="sliced")), "every layer"),
        ):
            with pytest.raises(PlanError, match=said):
                shoal.parallelize(
                    model, F.cross_entropy, sgd(model.parameters()), sample=sample, plan=wrong
                )

    copies = [copy.deepcopy(net()) for _ in range(2)]
    on_ranks(work, 2)
