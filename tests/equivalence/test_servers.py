"""Servers: that the strategy really uses them, what they hold, and what they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
    features,
)
from torch import Tensor, nn
from with_servers import mlp, steps, trained

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.errors import UsageError
from shoal.core.plan import Plan
from shoal.engine.engine import Engine
from shoal.optim.owners import Owners
from shoal.remote.orders import send_orders
from shoal.session.session import current
from shoal.strategies.server import shares


@pytest.mark.quick
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


def test_workers_own_no_state_where_servers_suffice() -> None:
    def loop(
        model: nn.Module, loss_fn: object, optimizer: torch.optim.Optimizer, batches: object
    ) -> int:
        steps(2)(model, loss_fn, optimizer, batches)
        model.state_dict()
        (owned,) = current().attached[model].parts
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
        (owned,) = current().attached[model].parts
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


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_parameters_come_back_while_gradients_of_the_same_lane_go(staleness: int | None) -> None:
    def loop(
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        batches: list,
    ) -> bool:
        (owned,) = current().attached[model].parts
        owners, routes = owned._owners, owned._owners._engine.routes
        first = owners.transfers[0]
        last = [t for t in owners.transfers if routes._there[t] is routes._there[first]][-1]
        came, go = threading.Event(), last.run

        def held(comm: ThreadComm) -> None:
            assert came.wait(10), "the first parameters have not come"
            go(comm)

        last.run = held
        x, y = batches[0]
        loss_fn(model(x), y).backward()
        optimizer.step()
        routes.settle(first)
        came.set()
        owners.settle()
        last.run = go
        return last is not first

    plan = trained(2, 2, lambda model, *_: current().attached[model].plan, pins={"*": "server"})[1][
        0
    ]
    assert isinstance(plan, Plan)
    assert trained(2, 2, loop, plan=replace(plan, staleness=staleness, late=99))[1] == [True, True]


def test_who_has_ended_is_not_waited_for() -> None:
    """Also with a last backward that no step follows."""

    def loop(model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batches: Any) -> int:
        number = 3 if shoal.world().rank == 0 else 12
        losses = steps(number)(model, loss_fn, optimizer, batches)
        if shoal.world().rank < 2:
            loss_fn(model(batches[0][0]), batches[0][1]).backward()
        return len(losses)

    assert trained(3, 2, loop, staleness=1)[1] == [3, 12, 12]


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

    assert_same(Training(model=built(mlp), batches=features(7, 3), loop=loop), 3, "server, small")


def test_a_step_takes_two_orders_however_many_buckets_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each waits at the links behind gradients, and a server takes one after the other."""
    sent = []

    def counted(orders: dict[int, Tensor], comm: ThreadComm) -> None:
        sent.append(orders.keys())
        send_orders(orders, comm)

    monkeypatch.setattr("shoal.servers.servers.send_orders", counted)

    def loop(model: nn.Module, *others: object) -> tuple[int, list[int]]:
        numbers = []
        for _ in range(3):
            steps(1)(model, *others)
            model.state_dict()  # the orders of the step are sent
            numbers.append(len(sent))
        (owned,) = current().attached[model].parts
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
            optimizer.log = threading.Lock()  # which is no plain data

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
