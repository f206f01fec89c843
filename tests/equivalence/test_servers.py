"""Servers: that the strategy really uses them, what they hold, and workers that run ahead of one
another.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from one_process import (
    Training,
    adamw,
    assert_same,
    built,
    cluster_of,
    cut_small,
    features,
    numbers,
    rows_of,
    sgd,
    state,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.transfer import OwnedTransfer, Slice
from shoal.core.errors import PlanError, UsageError
from shoal.core.plan import Plan
from shoal.runtime.ahead import Shelf
from shoal.runtime.engine import Engine
from shoal.runtime.orders import send_orders
from shoal.runtime.owners import Owners
from shoal.runtime.servers import serve
from shoal.runtime.session import current, using
from shoal.strategies.server import shares


@pytest.fixture(autouse=True)
def cut_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in several transfers, as large ones are; test_strategies.py has them whole."""
    cut_small(monkeypatch)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


@pytest.mark.parametrize(
    ("workers", "servers", "mine"),
    [(4, 4, 0.0), (4, 2, 0.1), (4, 1, 1 / 6), (2, 1, 0.25), (3, 5, 0), (1, 1, 0), (1, 2, 0)],
)
def test_shares_make_all_links_equally_busy(workers: int, servers: int, mine: float) -> None:
    *_, last = each = shares(workers, servers)
    assert each[0] == pytest.approx(mine)
    assert sum(each) == pytest.approx(1)
    if servers <= workers:
        assert 1 + (workers - 2) * mine == pytest.approx(workers * last)


def trained(
    workers: int,
    servers: int,
    loop: Callable[..., object],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **how: object,
) -> tuple[list[dict[str, Tensor]], list[object], list[list[Counter[int]]]]:
    """States and what loops returned on workers, and what servers observed."""
    model, cluster = built(mlp), cluster_of(workers, servers)
    copies = [copy.deepcopy(model) for _ in range(workers)]
    batches = features(7, 3)

    def work(comm: ThreadComm) -> object:
        if comm.rank >= workers:
            return serve(comm)
        mine = copies[comm.rank]
        own = [rows_of(batch, comm.rank, workers) for batch in batches]
        with using(comm, cluster) as session:
            _, loss_fn, its = shoal.parallelize(
                mine, F.cross_entropy, optimizer(mine.parameters()), sample=own[0], **how
            )
            assert {choice.strategy for choice in session.attached[mine].plan.choices} == {"server"}
            return state(mine), loop(mine, loss_fn, its, own), state(mine)

    hosts = cluster.topology.hosts + cluster.servers
    results = run(workers + servers, work, timeout_s=20, hosts=hosts, servers=servers)
    return [r[2] for r in results[:workers]], [r[1] for r in results[:workers]], results[workers:]


def steps(
    number: int, pause: Callable[[int, int], float] = lambda rank, step: 0.0
) -> Callable[..., list[float]]:
    """A loop of so many steps, and its losses; `pause` gives the seconds that a rank sleeps in a
    step.
    """

    def loop(
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batches: list,
    ) -> list:
        losses = []
        for step, (x, y) in enumerate(endless(batches, number)):
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(pause(shoal.world().rank, step))
            optimizer.step()
            losses.append(loss.item())
        return losses

    return loop


def endless(batches: list, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(number):
        yield batches[step % len(batches)]


def test_workers_own_no_state_where_servers_suffice() -> None:
    def loop(
        model: nn.Module, loss_fn: object, optimizer: torch.optim.Optimizer, batches: object
    ) -> int:
        steps(2)(model, loss_fn, optimizer, batches)
        model.state_dict()
        (owned,) = current().attached[model].owned
        return owned.state_bytes()

    assert trained(2, 2, loop, optimizer=adamw, pins={"*": "server"})[1] == [0, 0]


@pytest.mark.parametrize(
    ("late", "order"), [(0, "dcba"), (1, "dcba"), (2, "cdba"), (4, "abcd"), (5, "abcd")]
)
def test_late_transfers_come_back_first_and_the_others_as_forward_needs_them(
    late: int, order: str
) -> None:
    def transfer(label: str) -> OwnedTransfer:
        return cast(
            OwnedTransfer, SimpleNamespace(label=label, served=True, parameters=(), owned=())
        )

    owners = Owners(cast(Engine, None), [transfer(label) for label in "abcd"], rank=0, late=late)
    assert "".join(each.label for each in owners.returning) == order


def test_the_plan_says_which_are_late() -> None:
    def loop(model: nn.Module, *others: object) -> list[str]:
        (owned,) = current().attached[model].owned
        return [transfer.label for transfer in owned._owners.returning]

    _, plans, _ = trained(
        2, 2, lambda model, *others: current().attached[model].plan, pins={"*": "server"}
    )
    plan = plans[0]
    assert isinstance(plan, Plan)
    orders = [trained(2, 2, loop, plan=replace(plan, late=late))[1][0] for late in (0, 99)]
    assert orders[0] == list(reversed(orders[1])) and len(orders[0]) > 1


def test_the_order_in_which_parameters_come_back_changes_no_bit() -> None:
    def loop(
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batches: list,
    ) -> Plan:
        steps(3)(model, loss_fn, optimizer, batches)
        return current().attached[model].plan

    states, plans, _ = trained(2, 2, loop, optimizer=adamw, pins={"*": "server"})
    plan = plans[0]
    assert isinstance(plan, Plan)
    for late in {0, 1, 7, 99} - {plan.late}:
        again, _, _ = trained(2, 2, loop, optimizer=adamw, plan=replace(plan, late=late))
        assert all(torch.equal(again[0][name], states[0][name]) for name in states[0])


class Adding:
    """What a shelf asks of an update: here the parameters are the sum of all gradients."""

    def __init__(self) -> None:
        self.value = torch.zeros(5)
        self.steps = 0

    def step(self, gradients: list[Tensor | None], *work: object) -> None:
        (gradient,) = gradients
        self.steps += 1
        if gradient is not None:
            self.value += gradient

    def values(self) -> list[Tensor]:
        return [self.value]


def brought(worker: int, step: int) -> Slice:
    """A gradient of several magnitudes, so that a sum in another order has other bits."""
    return slice_of(
        numbers(5, seed=100 * worker + step, dtype=torch.float32) * 10.0 ** (worker - 1)
    )


def slice_of(values: Tensor) -> Slice:
    whole = torch.cat([values, torch.tensor([1.0, 0.0, 0.0, 1.0])])
    return Slice(whole, (whole[:5],), whole[5:6], whole[6:8], whole[8:])


def given(shelf: Shelf, worker: int, step: int) -> Tensor:
    """The parameters that a worker gets at its step."""
    answer = slice_of(torch.zeros(5))
    shelf.step(worker, brought(worker, step), 0, (), answer, lambda: None)
    return answer.values[0].clone()


def test_a_bound_of_0_gives_the_bits_of_the_synchronous_step() -> None:
    workers, number, update = 3, 20, Adding()
    shelf = Shelf([update], workers, 0)

    def work(comm: ThreadComm) -> list[Tensor]:
        got = []
        for step in range(number):
            time.sleep(0.001 * ((step + comm.rank) % 3))
            got.append(given(shelf, comm.rank, step))
        return got

    expected, total = [], torch.zeros(5)
    for step in range(number):
        gradient = brought(0, step).values[0].clone()
        for worker in range(1, workers):
            gradient += brought(worker, step).values[0]
        total += gradient
        expected.append(total.clone())
    for got in run(workers, work, timeout_s=20):
        assert all(map(torch.equal, got, expected))
    assert shelf.observed == {0: workers * number}
    assert update.steps == number


def test_a_step_is_applied_when_all_workers_have_brought_theirs() -> None:
    shelf = Shelf([Adding()], 2, 3)
    zero = torch.zeros(5)
    assert all(torch.equal(given(shelf, 0, step), zero) for step in range(3))  # worker 0 runs ahead
    first = brought(0, 0).values[0] + brought(1, 0).values[0]
    assert torch.equal(given(shelf, 1, 0), first)
    assert torch.equal(given(shelf, 0, 3), first)
    assert shelf.observed == {0: 1, 1: 1, 2: 1, 3: 2}


def test_without_a_bound_every_gradient_is_an_update_as_it_comes() -> None:
    shelf = Shelf([update := Adding()], 2, None)
    assert torch.equal(given(shelf, 0, 0), brought(0, 0).values[0])
    assert torch.equal(given(shelf, 0, 1), brought(0, 0).values[0] + brought(0, 1).values[0])
    given(shelf, 1, 0)
    assert update.steps == 3
    assert shelf.observed == {0: 1, 1: 1, 2: 1}


SLOW = 2  # a worker


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("bound", [1, 3])
def test_no_worker_is_ahead_by_more_than_the_bound(optimizer, bound) -> None:
    """One is slow for good: the others wait for it, and the loss falls all the same."""
    number, batches = 30, 5
    loop = steps(number, lambda rank, step: 0.02 if rank == SLOW else 0.0)
    _, losses, observed = trained(3, 2, loop, optimizer=optimizer, staleness=bound)
    for (histogram,) in observed:
        assert max(histogram) == bound, "the bound was never reached, so nothing was held"
        assert sum(histogram.values()) >= 3 * number
    first, last = (
        sum(sum(own[part]) for own in losses) for part in (slice(batches), slice(-batches, None))
    )
    assert last < first, "the mean loss of all ranks on the same batches"


def test_workers_that_run_ahead_are_answered_by_the_servers_that_own() -> None:
    observed = trained(2, 2, steps(4), staleness=1, placement={"*": 3})[2]
    assert [sum(histogram.values()) > 0 for (histogram,) in observed] == [False, True], (
        "rank 2 owns nothing"
    )
    with pytest.raises(PlanError, match="rank 1, which runs ahead"):
        trained(2, 1, steps(4), staleness=1, placement={"*": 1})


def test_without_a_bound_nobody_waits_for_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # in one bucket a layer, which is quick
    pause = 0.05
    began = {}

    def loop(*given: Any) -> float:
        began[shoal.world().rank] = time.perf_counter()
        losses = steps(10, lambda rank, step: pause if rank == SLOW else 0.0)(*given)
        assert len(losses) == 10
        return time.perf_counter() - began[shoal.world().rank]

    _, seconds, observed = trained(3, 2, loop, staleness=None)
    assert seconds[SLOW] >= 10 * pause
    assert max(seconds[:SLOW]) < 0.7 * seconds[SLOW]
    assert max(max(histogram) for (histogram,) in observed) >= 5


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_parameters_come_back_while_gradients_of_the_same_lane_go(staleness: int | None) -> None:
    def loop(
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batches: list,
    ) -> bool:
        (owned,) = current().attached[model].owned
        owners, engine = owned._owners, owned._owners._engine
        first = owners.transfers[0]
        last = [each for each in owners.transfers if engine._lane[each] is engine._lane[first]][-1]
        came, go = threading.Event(), last.run

        def held(comm: ThreadComm) -> None:
            assert came.wait(10), "the first parameters have not come"
            go(comm)

        last.run = held
        x, y = batches[0]
        loss_fn(model(x), y).backward()
        optimizer.step()
        engine.settle(first)
        came.set()
        owners.settle()
        last.run = go
        return last is not first

    plan = trained(2, 2, lambda model, *_: current().attached[model].plan, pins={"*": "server"})[1][
        0
    ]
    assert isinstance(plan, Plan)
    assert trained(2, 2, loop, plan=replace(plan, staleness=staleness, late=99))[1] == [True, True]


@pytest.mark.parametrize("late", [0, 1, 99])
def test_workers_that_run_ahead_are_answered_in_any_order(late: int) -> None:
    plan = trained(2, 2, lambda model, *_: current().attached[model].plan, staleness=1)[1][0]
    assert isinstance(plan, Plan)
    for (histogram,) in trained(2, 2, steps(6), plan=replace(plan, late=late))[2]:
        assert sum(histogram.values()) >= 2 * 6 and max(histogram) <= 1


def test_who_has_ended_is_not_waited_for() -> None:
    """Also with a last backward that no step follows."""

    def loop(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any) -> int:
        number = 3 if shoal.world().rank == 0 else 12
        losses = steps(number)(model, loss_fn, optimizer, batches)
        if shoal.world().rank < 2:
            loss_fn(model(batches[0][0]), batches[0][1]).backward()
        return len(losses)

    assert trained(3, 2, loop, staleness=1)[1] == [3, 12, 12]


def test_a_shelf_without_a_worker_goes_on_with_the_others() -> None:
    shelf = Shelf([Adding()], 3, 1)
    given(shelf, 1, 0)
    given(shelf, 2, 0)
    shelf.leave(0)
    both = brought(1, 0).values[0] + brought(2, 0).values[0]
    assert torch.equal(given(shelf, 1, 1), both)


def test_memory_that_somebody_keeps_may_be_written_at_any_time() -> None:
    def loop(
        model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any
    ) -> None:
        memory = [parameter.data for parameter in model.parameters()]
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            assert all(parameter.abs().sum() for parameter in model.parameters())  # they are here
            for each in memory:
                each.clamp_(-0.1, 0.1)

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, "server")


def test_a_step_takes_two_orders_however_many_buckets_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits at the links behind gradients, and a server takes one after the other."""
    sent = []

    def counted(orders: dict[int, Tensor], comm: ThreadComm) -> None:
        sent.append(orders.keys())
        send_orders(orders, comm)

    monkeypatch.setattr("shoal.runtime.servers.send_orders", counted)

    def loop(model: nn.Module, *others: object) -> tuple[int, list[int]]:
        numbers = []
        for _ in range(3):
            steps(1)(model, *others)
            model.state_dict()  # the orders of the step are sent
            numbers.append(len(sent))
        (owned,) = current().attached[model].owned
        return len(owned._owners.transfers), numbers

    (transfers, numbers), _ = trained(2, 2, loop, pins={"*": "server"})[1]
    assert transfers > 2
    assert [after - before for before, after in pairwise(numbers)] == [2, 2]
    assert all(servers == {2, 3} for servers in sent)


def test_an_order_that_cannot_be_sent_is_an_error_at_once() -> None:
    def loop(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.log = threading.Lock()  # which no pickle takes

    began = time.monotonic()
    with pytest.raises(UsageError, match="cannot be sent to the servers"):
        trained(2, 1, loop, pins={"*": "server"})
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["in place", "data", "loaded"])
def test_a_parameter_that_is_changed_is_changed_at_its_servers(how) -> None:
    def loop(
        model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any
    ) -> None:
        loss_fn(model(batches[0][0]), batches[0][1]).backward()
        optimizer.step()
        if how == "in place":
            with torch.no_grad():
                model[0].weight.fill_(0.5)
        elif how == "data":
            model[0].weight.data.fill_(0.5)
        else:
            model.load_state_dict(
                model.state_dict() | {"0.weight": torch.full((13, 7), 0.5, dtype=torch.float64)}
            )
        optimizer.zero_grad(set_to_none=False)
        optimizer.param_groups[0]["lr"] = 0.0
        loss_fn(model(batches[1][0]), batches[1][1]).backward()
        optimizer.step()

    for after in trained(3, 2, loop, pins={"*": "server"})[0]:
        assert (after["0.weight"] == 0.5).all()


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda model, optimizer: model[0].weight.grad, "a gradient is read"),
        (lambda model, optimizer: (assign(model), optimizer.step()), "assigned or cleared"),
        (lambda model, optimizer: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_"),
        (
            lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            "a gradient is read",
        ),
        (lambda model, optimizer: optimizer.state_dict(), "optimizer.state_dict"),
        (lambda model, optimizer: model(numbers(4, 7)).sum().backward(), "followed by one step"),
    ],
)
def test_what_no_worker_that_runs_ahead_can_have_is_refused(act, says) -> None:
    def loop(
        model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any
    ) -> None:
        steps(1)(model, loss_fn, optimizer, batches)
        loss_fn(model(batches[0][0]), batches[0][1]).backward()
        with pytest.raises(UsageError, match=says):
            act(model, optimizer)
        raise Ended

    with pytest.raises(Ended):
        trained(2, 1, loop, staleness=2)


def assign(model: nn.Module) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


class Ended(Exception):
    """The test has seen what it wanted."""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"staleness": -1}, "number of steps"),
        ({"staleness": 1.5}, "number of steps"),
        ({"staleness": 2, "pins": {"*": "replicate"}}, "nothing else can be said"),
        ({"staleness": 2, "strategies": ["server"]}, "nothing else can be said"),
        ({"staleness": 2, "count": lambda output, target: 1.0}, "weighs the same"),
    ],
)
def test_a_staleness_that_cannot_be_is_refused(how, says) -> None:
    with pytest.raises(UsageError, match=says):
        trained(2, 1, steps(1), **how)


def test_without_servers_a_staleness_is_refused() -> None:
    with pytest.raises(PlanError, match="no servers"):
        trained(2, 0, steps(1), staleness=1)


def test_a_plan_with_a_staleness_needs_servers_for_every_layer() -> None:
    def loop(model: nn.Module, loss_fn: Any, optimizer: Any, batches: Any) -> Plan:
        return current().attached[model].plan

    plan = trained(2, 1, loop, staleness=None)[1][0]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.staleness is None
    wrong = plan.with_choice(replace(plan.choices[0], strategy="replicate"))
    with pytest.raises(PlanError, match="replicate knows no staleness"):
        trained(2, 1, loop, plan=wrong)
    trained(2, 1, steps(2), plan=replace(plan, staleness=1))
    for how, says in (
        ({"staleness": 1}, "both a plan and a staleness"),
        ({"count": lambda output, target: 1.0}, "weighs the same"),
    ):
        with pytest.raises(UsageError, match=says):
            trained(2, 1, steps(1), plan=plan, **how)
