"""Orders to servers: they arrive as they were sent, and what could do harm is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.placement import Owner
from shoal.profiling.updates import form_of, made_of
from shoal.remote.optimizers import OptimizerForm, kind_of, name_of
from shoal.remote.orders import (
    AnyOrder,
    OpenModel,
    ParameterForm,
    ServedSite,
    receive_order,
    send_orders,
    verb_for,
    written_order,
)
from shoal.remote.verbs import End, MakeStep, Norm, PartOrder, PieceOrder
from shoal.remote.wire import Data, Message, MessageReader
from shoal_tools.testing.byte_counts import TracedComm

HEAD = 1 << 12  # bytes of an order's first message


def received(*orders: Message) -> tuple[list[Any], int]:
    """What a server gets, and in how many messages."""

    def work(comm: ThreadComm) -> Any:
        traced = TracedComm(comm)
        if comm.rank == 0:
            for order in orders:
                send_orders({1: written_order(order)}, traced)
            return traced.counts.messages_sent
        return [receive_order(MessageReader(AnyOrder), 0, traced) for _ in orders]

    messages, got = run(2, work, timeout_s=10)
    return got, messages


def test_orders_arrive_as_they_were_sent() -> None:
    form = ParameterForm((3, 2), (1, 3), torch.bfloat16)
    site = ServedSite("server", "direct", "b", {"0.w": form}, {"0.w": Owner(2)}, {"0.w": (0, 4)})
    gradient = torch.randn(5)
    step = MakeStep(
        1,
        Data([{"lr": 0.1}]),
        Data({}),
        {0: {2: PieceOrder(0, False, gradient), 1: PieceOrder(1, True, None)}},
    )
    optimizers = (form_of(torch.optim.SGD([torch.zeros(1)], lr=0.1)),)
    (opened, order, end), _ = received(
        OpenModel(4, (site,), optimizers, 3, None), PartOrder(4, ((0, 1), ()), step), End()
    )
    (got,) = opened.sites
    assert (got.parameters["0.w"].stride, got.owners, got.spans) == (
        (1, 3),
        {"0.w": Owner(2)},
        {"0.w": (0, 4)},
    )
    assert got.parameters["0.w"].dtype == torch.bfloat16
    assert (order.part, order.held) == (4, ((0, 1), ()))
    assert list(order.verb.pieces[0]) == [2, 1], "in the order in which they come back"
    assert torch.equal(order.verb.pieces[0][2].gradient, gradient)
    assert order.verb.groups.value == [{"lr": 0.1}]
    assert isinstance(end, End)


@pytest.mark.parametrize("nbytes", [0, HEAD - 200, HEAD, 3 * HEAD])
def test_an_order_of_a_step_is_one_message(nbytes: int) -> None:
    order = PartOrder(0, None, MakeStep(0, Data([{"name": "x" * nbytes}]), Data({}), {}))
    (first, second), messages = received(order, order)
    assert all(len(each.verb.groups.value[0]["name"]) == nbytes for each in (first, second))
    assert messages == 2 * (1 if nbytes < HEAD - 100 else 2)


def test_an_update_of_two_hundred_parameters_is_one_message() -> None:
    parameters = [torch.zeros(1) for _ in range(200)]
    optimizer = torch.optim.AdamW(parameters)
    given = {number: {0: PieceOrder(0, True, None)} for number in range(200)}
    groups = [{key: value for key, value in optimizer.param_groups[0].items() if key != "params"}]
    form = form_of(optimizer)
    order = PartOrder(0, None, MakeStep(0, Data(groups), form.attributes, given))
    assert received(order)[1] == 1


def test_a_verb_may_be_another_for_each_server() -> None:
    assert verb_for(3, Norm((), 2.0)).order == 2.0
    assert verb_for(3, lambda server: Norm((), float(server))).order == 3.0


def test_an_optimizer_is_made_from_its_name() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], betas=(0.8, 0.99))
    made = made_of(form_of(optimizer))
    assert type(made) is torch.optim.AdamW and made.defaults == optimizer.defaults
    assert made.param_groups == [] and not made.state


class Own(torch.optim.SGD):
    """An optimizer of a module."""

    class Inner(torch.optim.SGD):
        """One inside of it."""


@pytest.mark.parametrize("kind", [Own, Own.Inner])
def test_classes_of_modules_are_found(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind.__module__, sys.modules[__name__])
    assert kind_of(name_of(kind)) is kind


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "torch.optim:Optimizer.step",
        "torch.optim:lr_scheduler",
        "torch.optim:Nothing",
        "no.such.module:SGD",
        "torch.nn:Linear",
        "",
        ":",
        "torch.optim:",
    ],
)
def test_what_is_no_optimizer_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="do this: define the optimizer's class in a module"):
        made_of(OptimizerForm(name, Data({})))


def test_a_class_that_others_would_not_find_is_refused() -> None:
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(UsageError, match="not found"):
        form_of(Local([torch.zeros(1)], lr=0.1))
