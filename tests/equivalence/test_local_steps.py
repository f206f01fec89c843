"""Local steps: each outer rule equals a plain rendering of its algorithm in one process.

ranks     shoal: each rank steps on its rows, every H steps they come together
plain     one process with a model and an optimizer for each rank, written out below
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    Batch,
    State,
    assert_same_bits,
    built,
    call,
    cluster_of,
    difference,
    features,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, UsageError
from shoal.front.joining import using

RULES = {
    "nesterov": shoal.Outer(lr=0.7, momentum=0.9),
    "average": shoal.Outer(rule="average"),
    "slowmo": shoal.Outer(momentum=0.6, rule="slowmo"),
    "bmuf": shoal.Outer(rule="bmuf"),
}
STEPS, ROUND = 8, 3  # the last round is not full
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def net() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)))


def with_norm() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)))


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.2, momentum=0.5)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.02, weight_decay=0.1)


@dataclass
class Plain:
    """The algorithms as their papers have them, for N workers in one process."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    outer: shoal.Outer
    every: int
    old: list[Tensor] = field(init=False)
    velocity: list[Tensor] = field(init=False)
    rows: list[int] = field(init=False)
    steps: int = 0
    rate_before: float = 0.0

    def __post_init__(self) -> None:
        self.old = [p.detach().clone() for p in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.old]
        self.rows = [0] * len(self.models)

    def step(self, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            model, optimizer = self.models[number], self.optimizers[number]
            optimizer.zero_grad()
            F.cross_entropy(call(model, x), y).backward()
            optimizer.step()
            self.rows[number] += len(y)
        self.steps += 1
        if self.steps % self.every == 0:
            self.come_together()

    @torch.no_grad()
    def come_together(self) -> None:
        workers = [list(model.parameters()) for model in self.models]
        shares = [rows / sum(self.rows) for rows in self.rows]
        n, rate = len(workers), self.optimizers[0].param_groups[0]["lr"]
        for index, old in enumerate(self.old):
            mean = sum(share * ps[index] for share, ps in zip(shares, workers, strict=True))
            v = self.velocity[index]
            if self.outer.rule == "average":
                new = mean
            elif self.outer.rule == "nesterov":  # torch's own optimizer
                parameter = nn.Parameter(old.clone())
                torch_sgd = SGD(
                    [parameter], self.outer.lr or 0.0, self.outer.momentum or 0.0, nesterov=True
                )
                torch_sgd.state[parameter]["momentum_buffer"] = v
                parameter.grad = old - mean
                torch_sgd.step()
                new = parameter.detach()
            elif self.outer.rule == "slowmo":  # algorithm 1, line 7 and 8
                v.mul_(self.outer.momentum or 0.0).add_((old - mean) / rate)
                new = old - 1.0 * rate * v
            else:  # block momentum 1 - 1/N, block learning rate 1
                v.mul_(1 - 1 / n).add_(mean - old)
                new = old + v
            old.copy_(new)
            for parameters in workers:
                parameters[index].copy_(new)
        for buffers in zip(*(model.buffers() for model in self.models), strict=True):
            if buffers[0].is_floating_point():
                mean = sum(share * b for share, b in zip(shares, buffers, strict=True))
                for buffer in buffers:
                    buffer.copy_(mean)
        self.rows = [0] * n


def plain(
    make_model: Callable[[], nn.Module],
    make: Make,
    outer: shoal.Outer,
    ranks: int,
    batches: Sequence[Batch],
    *,
    uneven: bool = False,
    schedule: bool = False,
) -> Plain:
    models = [copy.deepcopy(make_model()) for _ in range(ranks)]
    workers = Plain(models, [make(m.parameters()) for m in models], outer, ROUND)
    for number, batch in enumerate(batches):
        workers.step([rows_of(batch, rank, ranks, uneven) for rank in range(ranks)])
        if schedule:
            set_rates(workers.optimizers, number)
    return workers


def set_rates(optimizers: Iterable[Optimizer], number: int) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (number + 2)


def on_ranks(
    make_model: Callable[[], nn.Module],
    make: Make,
    outer: shoal.Outer | None,
    ranks: int,
    batches: Sequence[Batch],
    *,
    uneven: bool = False,
    schedule: bool = False,
    **options: Any,
) -> tuple[list[State], list[State]]:
    """Each rank's own state after training, and what all have in common."""
    models = [copy.deepcopy(make_model()) for _ in range(ranks)]

    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, ranks, uneven) for batch in batches]
        model = models[comm.rank]
        with using(comm, cluster_of(ranks)):
            model, loss_fn, optimizer = shoal.parallelize(
                model,
                F.cross_entropy,
                make(model.parameters()),
                sample=mine[0],
                local_steps=ROUND,
                outer=outer,
                **options,
            )
            for number, (x, y) in enumerate(mine):
                optimizer.zero_grad()
                loss_fn(call(model, x), y).backward()
                optimizer.step()
                if schedule:
                    set_rates([optimizer], number)
            own = state(model)
            with shoal.global_weights(model):
                common = state(model)
            assert_same_bits([own, state(model)])
            return own, common

    own, common = zip(*run(ranks, work, timeout_s=20), strict=True)
    return list(own), list(common)


def assert_rule(
    make_model: Callable[[], nn.Module], make: Make, outer: shoal.Outer, ranks: int, **how: Any
) -> None:
    batches = features(6, 4, steps=STEPS)
    expected = plain(make_model, make, outer, ranks, batches, **how)
    own, common = on_ranks(make_model, make, outer, ranks, batches, **how)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10
    parameters = dict(zip(dict(make_model().named_parameters()), expected.old, strict=True))
    got = {name: common[0][name] for name in parameters}
    assert difference(parameters, got) <= 1e-10
    if ranks > 1:
        assert difference(own[0], own[1]) > 1e-3, "ranks did not step by themselves"


_QUICK = {("nesterov", 3), ("slowmo", 2), ("bmuf", 4), ("average", 1)}


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        pytest.param(rule, ranks, marks=[] if (rule, ranks) in _QUICK else pytest.mark.slow)
        for rule in RULES
        for ranks in (1, 2, 3, 4)
    ],
)
def test_rule_is_its_algorithm(rule: str, ranks: int) -> None:
    assert_rule(net, sgd, RULES[rule], ranks, uneven=True)


def test_slowmo_follows_a_schedule() -> None:
    assert_rule(net, sgd, RULES["slowmo"], 2, schedule=True)


def test_ranks_have_their_own_moments() -> None:
    assert_rule(net, adamw, RULES["nesterov"], 3)


def test_buffers_are_averaged() -> None:
    assert_rule(with_norm, sgd, RULES["average"], 2, uneven=True)


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ("slowmo", 2, 1),
        *(
            pytest.param(rule, first, second, marks=pytest.mark.slow)
            for rule in ("nesterov", "slowmo")
            for first, second in ((2, 3), (3, 1), (1, 2), (3, 3))
        ),
    ],
)
def test_goes_on_with_other_ranks(rule: str, first: int, second: int, tmp_path: Path) -> None:
    """A checkpoint has the weights of the last round's end, and the mean of the moments."""
    batches, outer = features(6, 4, steps=STEPS), RULES[rule]
    before, after = batches[:7], batches[7:] + batches[:4]  # saved within a round
    workers = plain(net, adamw, outer, first, before, uneven=True)
    models = [copy.deepcopy(workers.models[0]) for _ in range(second)]
    going_on = Plain(models, [adamw(m.parameters()) for m in models], outer, ROUND)
    going_on.velocity = [v.clone() for v in workers.velocity]
    for model, optimizer in zip(models, going_on.optimizers, strict=True):
        for p, old in zip(model.parameters(), workers.old, strict=True):
            p.data.copy_(old)
        optimizer.load_state_dict(mean_of([o.state_dict() for o in workers.optimizers]))
    going_on.old = [old.clone() for old in workers.old]
    for batch in after:
        going_on.step([rows_of(batch, rank, second, True) for rank in range(second)])

    def train(comm: ThreadComm, model: nn.Module, batches: Sequence[Batch], *, loads: bool) -> None:
        mine = [rows_of(batch, comm.rank, comm.size, True) for batch in batches]
        model, loss_fn, optimizer = shoal.parallelize(
            model,
            F.cross_entropy,
            adamw(model.parameters()),
            sample=mine[0],
            local_steps=ROUND,
            outer=outer,
        )
        if loads:
            shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
        for x, y in mine:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        if not loads:
            own = state(model)
            shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
            assert_same_bits([own, state(model)])

    def on(ranks: int, batches: Sequence[Batch], *, loads: bool) -> list[nn.Module]:
        copies = [net() for _ in range(ranks)]

        def work(comm: ThreadComm) -> None:
            with using(comm, cluster_of(ranks)):
                train(comm, copies[comm.rank], batches, loads=loads)

        run(ranks, work, timeout_s=20)
        return copies

    on(first, before, loads=False)
    trained = on(second, after, loads=True)
    for model, expected in zip(trained, going_on.models, strict=True):
        assert difference(state(expected), state(model)) <= 1e-10


def mean_of(states: Sequence[Any]) -> Any:
    """The mean of optimizers' states."""
    mean = copy.deepcopy(states[0])
    for number, values in mean["state"].items():
        for name in values:
            every = [each["state"][number][name] for each in states]
            values[name] = torch.stack(every).mean(0)
    return mean


@dataclass
class Late(Plain):
    """As plain averaging, in which what is sent is taken over so many steps later."""

    lag: int = 1
    sent: list[list[Tensor]] = field(default_factory=list)

    def step(self, batches: Sequence[Batch]) -> None:
        super().step(batches)
        if self.sent and self.steps % self.every == self.lag:
            self.take_over()

    @torch.no_grad()
    def come_together(self) -> None:
        self.sent = [[p.detach().clone() for p in m.parameters()] for m in self.models]
        self.sent_rows, self.rows = self.rows, [0] * len(self.rows)

    @torch.no_grad()
    def take_over(self) -> None:
        shares = [rows / sum(self.sent_rows) for rows in self.sent_rows]
        for index, old in enumerate(self.old):
            mean = sum(s * ps[index] for s, ps in zip(shares, self.sent, strict=True))
            for model, sent in zip(self.models, self.sent, strict=True):
                p = list(model.parameters())[index]
                p.add_(mean - sent[index])
            old.copy_(mean)
        self.sent = []


def test_with_a_lag_steps_go_on_meanwhile() -> None:
    batches, outer = features(6, 4, steps=STEPS), shoal.Outer(rule="average", lag=1)
    models = [copy.deepcopy(net()) for _ in range(2)]
    expected = Late(models, [sgd(m.parameters()) for m in models], outer, ROUND)
    for batch in batches:
        expected.step([rows_of(batch, rank, 2, True) for rank in range(2)])
    own, common = on_ranks(net, sgd, outer, 2, batches, uneven=True)
    assert_same_bits(common)
    for rank, model in enumerate(expected.models):
        assert difference(state(model), own[rank]) <= 1e-10


def test_buckets_take_turns() -> None:
    """Each of two buckets goes every third step, one of them a step later."""
    seen: list[list[int]] = []

    def work(comm: ThreadComm) -> None:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                net_of[comm.rank],
                F.cross_entropy,
                sgd(net_of[comm.rank].parameters()),
                sample=(x, y),
                local_steps=4,
                outer=shoal.Outer(rule="average", lag=2),
                search_options=shoal.SearchOptions(bucket_bytes=(8,), least_part_bytes=1),
            )
            changed = []
            for step in range(12):
                with shoal.global_weights(model):
                    before = state(model)
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
                with shoal.global_weights(model):
                    changed += [
                        (step, name)
                        for name, value in state(model).items()
                        if not torch.equal(value, before[name])
                    ]
            if comm.rank == 0:
                seen.append([step for step, name in changed if name == "0.weight"])
                seen.append([step for step, name in changed if name == "2.weight"])

    net_of = [net(), net()]
    run(2, work, timeout_s=20)
    first, second = sorted(seen)
    assert first == [5, 9]
    assert second == [7, 11]


@pytest.mark.parametrize(("codec", "bound"), [("bfloat16", 1e-2), ("int8", 5e-2)])
def test_codec_stays_near(codec: str, bound: float) -> None:
    """Ranks have the same bits, and are as near to one process as the codec is."""
    batches = features(6, 4, steps=12)
    exact, _ = on_ranks(net, sgd, RULES["average"], 3, batches)
    own, common = on_ranks(
        net, sgd, RULES["average"], 3, batches, pins={"*": f"replicate:direct+{codec}"}
    )
    assert_same_bits(common)
    assert_same_bits(own)  # 12 steps end a round
    assert 0 < difference(exact[0], own[0]) < bound


def test_what_was_trained_is_given_back() -> None:
    """After unparallelize every rank has the weights that all have in common."""

    def work(comm: ThreadComm) -> tuple[State, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=5)]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps=ROUND,
            )
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            with shoal.global_weights(model):
                common = state(model)
            shoal.unparallelize(model)
            assert not hasattr(optimizer, "accumulate")
            return common, state(model)

    nets = [net(), net()]
    (common, first), (_, second) = run(2, work, timeout_s=20)
    assert_same_bits([common, first, second])


def test_plan_says_it_and_is_taken_again() -> None:
    def work(comm: ThreadComm) -> tuple[str, State]:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=4)]
        with using(comm, cluster_of(2)):
            made = []
            for number, options in enumerate(
                ({"local_steps": 2, "outer": RULES["bmuf"]}, {"plan": None})
            ):
                if number:
                    options = {"plan": shoal.Plan.from_json(made[0][0])}
                model, loss_fn, optimizer = shoal.parallelize(
                    nets[number][comm.rank],
                    F.cross_entropy,
                    sgd(nets[number][comm.rank].parameters()),
                    sample=mine[0],
                    **options,
                )
                for x, y in mine:
                    optimizer.zero_grad()
                    loss_fn(model(x), y).backward()
                    optimizer.step()
                plan = shoal.plan_of(model)
                assert plan is not None
                made.append((plan.to_json(), state(model)))
                assert "2 local steps, bmuf(lr=1, momentum=0.5)" in str(plan)
            assert_same_bits([made[0][1], made[1][1]])
            return made[1]

    nets = [[net(), net()], [net(), net()]]
    run(2, work, timeout_s=20)


def test_auto_trains() -> None:
    def work(comm: ThreadComm) -> State:
        mine = [rows_of(batch, comm.rank, 2) for batch in features(6, 4, steps=3)]
        with using(comm, cluster_of(2)):
            model, loss_fn, optimizer = shoal.parallelize(
                nets[comm.rank],
                F.cross_entropy,
                sgd(nets[comm.rank].parameters()),
                sample=mine[0],
                local_steps="auto",
            )
            plan = shoal.plan_of(model)
            assert plan is not None and plan.outer is not None
            assert 1 <= (plan.outer.lag or 0) <= plan.local_steps
            for x, y in mine:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
            shoal.unparallelize(model)
            return state(model)

    nets = [net(), net()]
    states = run(2, work, timeout_s=20)
    assert_same_bits(states)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "H of 0": ({"local_steps": 0}, UsageError, "at least 1"),
    "H of True": ({"local_steps": True}, UsageError, "at least 1"),
    "H of 2.5": ({"local_steps": 2.5}, UsageError, "at least 1"),
    "H of a word": ({"local_steps": "many"}, UsageError, '"auto"'),
    "a rule without steps": ({"outer": shoal.Outer()}, UsageError, "no local_steps"),
    "an optimizer of torch": (
        {"local_steps": 4, "outer": SGD([nn.Parameter(torch.zeros(1))], 0.7)},
        UsageError,
        "no shoal.Outer",
    ),
    "a staleness": ({"local_steps": 4, "staleness": 2}, PlanError, "staleness"),
    "another strategy": (
        {"local_steps": 4, "pins": {"*": "sliced:direct"}},
        PlanError,
        "all of every layer",
    ),
    "strategies": ({"local_steps": 4, "strategies": ["factor"]}, PlanError, "all of every layer"),
    "an exchange of one half": (
        {"local_steps": 4, "pins": {"*": "replicate:tree"}},
        PlanError,
        "two halves",
    ),
    "norms over all ranks": (
        {"local_steps": 4, "sync_batchnorm": True},
        PlanError,
        "rows of all",
    ),
    "a lag beyond H": (
        {"local_steps": 4, "outer": shoal.Outer(lag=5)},
        UsageError,
        "lag",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_on_every_rank(case: str) -> None:
    options, error, said = BAD[case]

    def work(comm: ThreadComm) -> str:
        x, y = rows_of(features(6, 4, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)), pytest.raises(Exception) as caught:
            model = nets[comm.rank]
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=(x, y), **options
            )
        assert isinstance(caught.value, error), caught.value
        return str(caught.value)

    nets = [net(), net()]
    for message in run(2, work, timeout_s=20):
        assert said in message, message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rule": "adam"}, "one of average"),
        ({"lr": 0.0}, "above 0"),
        ({"lr": float("nan")}, "above 0"),
        ({"momentum": 1.0}, "below 1"),
        ({"momentum": -0.1}, "below 1"),
        ({"rule": "average", "momentum": 0.9}, "no momentum"),
        ({"lag": -1}, "number of steps"),
    ],
)
def test_outer_rule_refuses(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shoal.Outer(**options)
