"""Layers that are updated once in k steps: as a loop in one process does that accumulates.

ranks     shoal, `update_every=`: gradients of these layers are kept on each rank, and exchanged and
          applied with the k-th
plain     one process on whole batches: their gradients, times rows, are added up, and the optimizer
          sees the mean of k steps, or none
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import (
    SMALL,
    Batch,
    State,
    adamw,
    assert_same_bits,
    built,
    cluster_of,
    difference,
    integers,
    numbers,
    rows_of,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.transfer import Transfer
from shoal.core.errors import PlanError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.plan import Plan
from shoal.front.session_start import using
from shoal.session.session import current

EVERY = {"1": 3, "2": 2}
ROWS = (12, 12, 8, 12, 4, 12, 12)  # of each batch; after 7 steps both periods have begun anew
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What moves a parameter also where its gradient is 0."""
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


class Net(nn.Sequential):
    """Three layers, the last of which may be left out of a step."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self
        y = second(torch.tanh(first(x)))
        return y if self.__dict__.get("short") else y + last(torch.tanh(y))


def net() -> nn.Module:
    return built(lambda: Net(nn.Linear(6, 9), nn.Linear(9, 4), nn.Linear(4, 4)))


def data() -> list[Batch]:
    return [(numbers(n, 6, seed=s), integers(4, n, seed=s)) for s, n in enumerate(ROWS)]


class Plain:
    """The rule, in one process."""

    def __init__(self, make: Make, every: Mapping[str, int]) -> None:
        self.model, self.every = net(), every
        self.optimizer = make(self.model.parameters())
        self.steps = 0
        self.sums = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.rows = dict.fromkeys(self.sums, 0)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.apply(len(y))

    def apply(self, rows: int) -> None:
        self.steps += 1
        for name, p in self.model.named_parameters():
            every = self.every.get(name.partition(".")[0], 1)
            self.rows[name] += rows
            if p.grad is not None:
                self.sums[name] += p.grad * rows
            p.grad = None
            if self.steps % every == 0:
                if self.sums[name].any():
                    p.grad = self.sums[name] / self.rows[name]
                self.sums[name], self.rows[name] = torch.zeros_like(p), 0
        self.optimizer.step()


def plain(make: Make, batches: Iterable[Batch], every: Mapping[str, int] = EVERY) -> State:
    one = Plain(make, every)
    for x, y in batches:
        one.step(x, y)
    return state(one.model)


def spread(
    model: nn.Module, make: Make, sample: Batch, way: str, **options: Any
) -> tuple[Any, Any, Any]:
    options = {"update_every": EVERY, "pins": {"*": way}, "search_options": SMALL} | options
    return shoal.parallelize(
        model, F.cross_entropy, make(model.parameters()), sample=sample, **options
    )


def train(model: nn.Module, loss_fn: Any, optimizer: Optimizer, batches: Iterable[Batch]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def on_ranks(ranks: int, work: Callable[[ThreadComm, nn.Module], Any]) -> list[Any]:
    models = [net() for _ in range(ranks)]

    def within(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(ranks)):
            return work(comm, models[comm.rank])

    return run(ranks, within, timeout_s=20)


def trained(
    ranks: int, make: Make, way: str, batches: Sequence[Batch], **options: Any
) -> list[State]:
    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, ranks, uneven=True) for batch in batches]
        train(*spread(model, make, mine[0], way, **options), mine)
        return state(model)

    return on_ranks(ranks, work)


_QUICK = {(1, "replicate:direct"), (3, "replicate:direct"), (2, "sliced:direct")}


@pytest.mark.parametrize(
    ("ranks", "way", "make"),
    [
        pytest.param(
            ranks,
            way,
            make,
            marks=()
            if (ranks, way) in _QUICK and (make is sgd) == (ranks != 2)
            else pytest.mark.slow,
        )
        for ranks in (1, 2, 3, 4)
        for way in ("replicate:direct", "replicate:allreduce", "sliced:direct")
        for make in (sgd, adamw)
    ],
)
def test_a_layer_is_updated_by_the_mean_of_its_steps(ranks: int, way: str, make: Make) -> None:
    expected = plain(make, data())
    got = trained(ranks, make, way, data())
    assert_same_bits(got)
    assert difference(expected, got[0]) <= 1e-10
    assert difference(plain(make, data(), {}), expected) > 1e-3, "it is what each step gives"


def fused(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)


@pytest.mark.parametrize(
    "way", ["replicate:direct", pytest.param("sliced:direct", marks=pytest.mark.slow)]
)
def test_a_fused_optimizer_begins_with_some_layers_later(way: str) -> None:
    assert difference(plain(sgd, data()), trained(2, fused, way, data())[0]) <= 1e-10


def test_a_fused_optimizer_with_a_dampening_is_refused() -> None:
    def damped(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, fused=True)

    with pytest.raises(PlanError, match="fused=False"):
        trained(2, damped, "replicate:direct", data())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct"])
def test_with_low_memory_the_same(way: str) -> None:
    got = trained(3, sgd, way, data(), memory="low")
    assert difference(plain(sgd, data()), got[0]) <= 1e-10


@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct"])
def test_a_layer_that_the_last_step_does_not_use(way: str) -> None:
    """What the steps before it have kept is applied all the same."""
    batches, one = data(), Plain(sgd, EVERY)
    short = [False, True, True, True, False, True, False]  # of the third period nothing is there
    for (x, y), one.model.__dict__["short"] in zip(batches, short, strict=True):
        one.step(x, y)

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2, uneven=True) for batch in batches]
        parts = spread(model, sgd, mine[0], way)
        for batch, model.__dict__["short"] in zip(mine, short, strict=True):
            train(*parts, [batch])
        return state(model)

    got = on_ranks(2, work)
    assert_same_bits(got)
    assert difference(state(one.model), got[0]) <= 1e-10


@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct"])
def test_a_step_of_several_backwards_counts_once(way: str) -> None:
    batches, one = [batch for batch in data() if len(batch[1]) == 12], Plain(sgd, EVERY)
    for x, y in batches:
        one.optimizer.zero_grad()
        for _ in range(2):
            F.cross_entropy(one.model(x), y).backward()
        one.apply(len(y))

    def work(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2, uneven=True) for batch in batches]
        model, loss_fn, optimizer = spread(model, sgd, mine[0], way)
        for x, y in mine:
            optimizer.zero_grad()
            with optimizer.accumulate():
                loss_fn(model(x), y).backward()
            loss_fn(model(x), y).backward()
            optimizer.step()
        return state(model)

    got = on_ranks(2, work)
    assert difference(state(one.model), got[0]) <= 1e-10


@pytest.mark.parametrize(
    ("first", "second", "way"),
    [
        (2, 3, "replicate:direct"),
        *(
            pytest.param(first, second, way, marks=pytest.mark.slow)
            for first, second in ((3, 1), (1, 2), (2, 2))
            for way in ("replicate:direct", "sliced:direct")
        ),
    ],
)
def test_a_checkpoint_has_what_is_kept(first: int, second: int, way: str, tmp_path: Path) -> None:
    """Saved behind the fourth step: one layer has gradients of one step, the other of none."""
    batches = data()
    expected = plain(adamw, batches)

    def before(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, first, uneven=True) for batch in batches]
        model, loss_fn, optimizer = spread(model, adamw, mine[0], way)
        train(model, loss_fn, optimizer, mine[:4])
        shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
        train(model, loss_fn, optimizer, mine[4:])
        return state(model)

    def after(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, second, uneven=True) for batch in batches]
        model, loss_fn, optimizer = spread(model, adamw, mine[0], way)
        train(model, loss_fn, optimizer, mine[:2])  # what is kept of these is forgotten
        shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
        train(model, loss_fn, optimizer, mine[4:])
        return state(model)

    assert difference(expected, on_ranks(first, before)[0]) <= 1e-10
    got = on_ranks(second, after)
    assert_same_bits(got)
    assert difference(expected, got[0]) <= 1e-10


def test_what_nobody_keeps_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: ThreadComm, model: nn.Module) -> None:
        batch = rows_of(data()[0], comm.rank, 2)
        model, loss_fn, optimizer = spread(model, sgd, batch, "replicate:direct")
        train(model, loss_fn, optimizer, [batch])
        shoal.save(tmp_path / "saved", model=model, optimizer=optimizer)
        with pytest.raises(UsageError, match="until the step that ends their update period"):
            shoal.unparallelize(model)
        train(model, loss_fn, optimizer, [batch] * 5)
        shoal.unparallelize(model)
        model, *_ = shoal.parallelize(model, loss_fn, optimizer, sample=batch)
        shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)

    with caplog.at_level(logging.WARNING, "shoal"):
        on_ranks(2, work)
    assert "gradients of steps before their update" in caplog.text
    assert "1.weight" in caplog.text


def test_what_is_not_due_is_not_sent() -> None:
    """Layer 1 goes in steps 3 and 6, layer 2 in 2, 4 and 6."""

    def work(comm: ThreadComm, model: nn.Module) -> list[set[str]]:
        batch = rows_of(data()[0], comm.rank, 2)
        parts = spread(model, sgd, batch, "replicate:direct")
        routes, sent = current().attached[model].engine.routes, []
        send, labels = routes.send, list[str]()

        def noted(transfer: Transfer) -> Any:
            labels.append(transfer.label)
            return send(transfer)

        routes.send = noted
        for _ in range(6):
            labels.clear()
            train(*parts, [batch])
            sent.append({name for name in "012" if any(f": {name})" in t for t in labels)})
        return sent

    for sent in on_ranks(2, work):
        assert sent == [{"0"}, {"0", "2"}, {"0", "1"}, {"0", "2"}, {"0"}, {"0", "1", "2"}]


def test_the_plan_says_it_and_is_taken_again() -> None:
    batches = data()

    def made(comm: ThreadComm, model: nn.Module) -> str:
        mine = rows_of(batches[0], comm.rank, 2, uneven=True)
        options = {"update_every": {"*": 5, "0": 1, "1": 3, "2": 2}}
        model, *_ = spread(model, sgd, mine, "replicate:direct", **options)
        plan = shoal.plan_of(model)
        assert plan is not None and plan.update_every == EVERY
        assert "replicate:direct, every 3 steps" in str(plan)
        return plan.to_json()

    written = on_ranks(2, made)[0]

    def again(comm: ThreadComm, model: nn.Module) -> State:
        mine = [rows_of(batch, comm.rank, 2, uneven=True) for batch in batches]
        plan = Plan.from_json(written)
        parts = shoal.parallelize(
            model, F.cross_entropy, sgd(model.parameters()), sample=mine[0], plan=plan
        )
        train(*parts, mine)
        return state(model)

    assert difference(plain(sgd, batches), on_ranks(2, again)[0]) <= 1e-10


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no layer": ({"update_every": {"clasifier": 4}}, "matches no layer"),
    "0 steps": ({"update_every": {"1": 0}}, "from 1 to 512"),
    "-2 steps": ({"update_every": {"1": -2}}, "from 1 to 512"),
    "half a step": ({"update_every": {"1": 2.5}}, "from 1 to 512"),
    "True steps": ({"update_every": {"1": True}}, "from 1 to 512"),
    "too many steps": ({"update_every": {"1": 1000}}, "from 1 to 512"),
    "a number": ({"update_every": 4}, "not a mapping"),
    "a layer by number": ({"update_every": {1: 4}}, "by the name of a layer"),
    "local steps": ({"local_steps": 4, "pins": None}, "do not go together"),
    "factors": ({"pins": {"1": "factor"}}, "replicate or sliced"),
    "a cut layer": ({"pins": {"1": "column"}}, "replicate or sliced"),
    "a plan, too": ({"plan": None, "pins": None}, "both a plan and update_every"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    options, said = BAD[case]

    def work(comm: ThreadComm, model: nn.Module) -> str:
        sample = rows_of(data()[0], comm.rank, 2)
        chosen = dict(options)
        if "plan" in chosen:
            chosen["plan"] = Plan(2, "", (), 1 << 20, 3)
            chosen["search_options"] = shoal.SearchOptions()
        with pytest.raises(PlanError) as caught:
            spread(model, sgd, sample, "replicate:direct", **chosen)
        return str(caught.value)

    for message in on_ranks(2, work):
        assert said in message, message
    if case == "no layer":
        assert "a layer such as 0, 1, 2" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"update_every": {"8": 2}}, "matches no layer"),
        ({"update_every": {"1": 0}}, "from 1 to 512"),
        ({"staleness": 1}, "there are no servers"),
        ({"strategy": "factor"}, "replicate or sliced"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    def work(comm: ThreadComm, model: nn.Module) -> None:
        sample = rows_of(data()[0], comm.rank, 2)
        other, *_ = spread(others[comm.rank], sgd, sample, "replicate:direct")
        plan = shoal.plan_of(other)
        assert plan is not None
        if "strategy" in change:
            wrong = plan.with_choice(replace(plan.choice("1"), exchange="", **change))
        else:
            wrong = replace(plan, **change)
        with pytest.raises(PlanError, match=said):
            shoal.parallelize(
                model, F.cross_entropy, sgd(model.parameters()), sample=sample, plan=wrong
            )

    others = [net(), net()]
    on_ranks(2, work)


def test_a_gradient_that_was_not_cleared_is_told() -> None:
    """Its owner has it still, and would apply it once more."""

    def work(comm: ThreadComm, model: nn.Module) -> None:
        x, y = rows_of(data()[0], comm.rank, 2)
        model, loss_fn, optimizer = spread(model, sgd, (x, y), "sliced:direct")
        train(model, loss_fn, optimizer, [(x, y)] * 2)
        with pytest.raises(UsageError, match=r"optimizer.zero_grad\(\)"):
            loss_fn(model(x), y).backward()
        raise Ended

    with pytest.raises(Ended):
        on_ranks(2, work)


@pytest.mark.parametrize("inside", [False, True])
def test_a_second_backward_behind_a_period_is_told(inside: bool) -> None:
    """`.grad` has the mean that is still to be applied: kept, it would be applied once more."""

    def work(comm: ThreadComm, model: nn.Module) -> None:
        x, y = rows_of(data()[0], comm.rank, 2)
        model, loss_fn, optimizer = spread(model, sgd, (x, y), "replicate:direct")
        optimizer.zero_grad()
        for _ in range(2):  # the period of layer 2 ends
            loss_fn(model(x), y).backward()
        with (
            pytest.raises(UsageError, match=r"parameter 2\.weight.*\n(.*\n)*.*zero_grad"),
            optimizer.accumulate() if inside else nullcontext(),
        ):
            loss_fn(model(x), y).backward()
        raise Ended

    with pytest.raises(Ended):
        on_ranks(2, work)


@pytest.mark.parametrize("way", ["replicate:direct", "sliced:direct"])
@pytest.mark.parametrize("by_model", [True, False])
def test_gradients_may_be_cleared_by_zeros_and_steps_skipped(way: str, by_model: bool) -> None:
    """As a GradScaler skips them. Also where a loss calls submodules, not the model."""

    def work(comm: ThreadComm, model: nn.Module, to_none: bool) -> State:
        x, y = rows_of(data()[0], comm.rank, 2)
        model, _, optimizer = spread(model, sgd, (x, y), way)
        for step in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            out = model(x) if by_model else model.forward(x)
            F.cross_entropy(out, y).backward()
            if step != 1:  # which ended a period
                optimizer.step()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    none = on_ranks(2, lambda comm, model: work(comm, model, True))[0]
    zeros = on_ranks(2, lambda comm, model: work(comm, model, False))[0]
    assert none.keys() == zeros.keys()
    assert difference(none, zeros) <= 1e-10


@pytest.mark.parametrize(("every", "is_kept"), [({"1": 3, "2": 4}, True), (EVERY, False)])
def test_a_period_takes_what_has_one_mean(
    every: dict[str, int], is_kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved behind a step in which two periods have kept as much, or one of them nothing yet."""
    batch, steps = data()[0], 1 if is_kept else 5

    def before(comm: ThreadComm, model: nn.Module) -> None:
        mine = rows_of(batch, comm.rank, 2)
        parts = spread(model, sgd, mine, "replicate:direct", update_every=every)
        train(*parts, [mine] * steps)
        shoal.save(tmp_path / "saved", model=model, optimizer=parts[2])

    def after(comm: ThreadComm, model: nn.Module) -> list[int]:
        mine = rows_of(batch, comm.rank, 2)
        options = {"update_every": {"1": 4, "2": 4}}
        model, _, optimizer = spread(model, sgd, mine, "replicate:direct", **options)
        shoal.load(tmp_path / "saved", model=model, optimizer=optimizer)
        return [period.steps for period in current().attached[model].engine.periods]

    on_ranks(2, before)
    with caplog.at_level(logging.WARNING, "shoal"):
        assert on_ranks(2, after) == [[int(is_kept)]] * 2
    assert ("gradients of other steps" in caplog.text) != is_kept


def test_what_is_not_applied_at_the_end_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(model: nn.Module, rank: int, steps: int) -> None:
        batch = rows_of(data()[0], rank, 2)
        train(*spread(model, sgd, batch, "replicate:direct"), [batch] * steps)

    for steps, told in ((6, []), (5, ["step 2 of 3", "step 1 of 2"])):
        caplog.clear()
        trained_so = partial(work, steps=steps)
        with caplog.at_level(logging.WARNING, "shoal"):
            on_ranks(2, lambda comm, model, so=trained_so: so(model, comm.rank))
        said = [m for m in caplog.messages if "were not applied" in m]
        assert len(said) == len(told), said
        for part, layer in zip(told, "12", strict=False):
            assert any(part in m and f"of layer {layer} were" in m for m in said), said


class Ended(Exception):
    """The test has seen what it wanted."""


def test_the_search_knows_which_layers_are_updated_seldom() -> None:
    """Few rows and a slow link: factor serves a wide layer best, but has no periods."""

    def work(comm: ThreadComm) -> list[str]:
        model = built(lambda: nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 4)))
        slow = Cluster(Topology(("one", "other")), Link(1e-5, 1e5))
        sample = numbers(2, 64, seed=0), integers(4, 2, seed=0)
        ways = []
        for periods in ({}, {"0": 2}):
            with using(comm, slow):
                network = copy.deepcopy(model)
                optimizer = sgd(network.parameters())
                shoal.parallelize(
                    network, F.cross_entropy, optimizer, sample=sample, update_every=periods
                )
                plan = shoal.plan_of(network)
                assert plan is not None
                ways.append(plan.choice("0").strategy)
        return ways

    for freely, seldom in run(2, work, timeout_s=60):
        assert freely not in ("replicate", "sliced")
        assert seldom in ("replicate", "sliced")
