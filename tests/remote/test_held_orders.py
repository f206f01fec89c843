"""Orders about parameters that a host holds: on the wire, and at the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from wire_sizes import wire_bytes

from shoal.core.errors import WorldError
from shoal.optim.extend import extend
from shoal.remote.station_messages import HeldGroup, HeldOrder, StationBackward, StationOrder
from shoal.remote.verbs import (
    Aspect,
    End,
    MakeStep,
    Norm,
    Pull,
    Push,
    Read,
    ScaleBy,
    Sum,
    Verb,
    Write,
)
from shoal.remote.wire import Data, MessageReader, written
from shoal.servers.held import HeldParameters

SETTINGS = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5).defaults
GROUPS = (HeldGroup(Data(SETTINGS), ("a",)),)


class Answers:
    """A channel that keeps the answers."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def post(self, content: Any) -> None:
        self.posted.append(content)


def host() -> tuple[nn.Parameter, HeldParameters, Answers]:
    """A host with one parameter of two numbers, and a way of answers."""
    parameter, answers = nn.Parameter(torch.tensor([3.0, 4.0])), Answers()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    extend(optimizer)
    channels: Any = [answers]
    return parameter, HeldParameters({"a": parameter}, [optimizer], channels), answers


def of_all(verb: Verb, *, cleared: bool = False) -> HeldOrder:
    return HeldOrder(verb, "", 0, (cleared,), GROUPS)


@pytest.mark.parametrize(
    "order",
    [
        HeldOrder(Read(Aspect.VALUES), "head.weight"),
        HeldOrder(Push(None, torch.ones(7)), "head.weight", cleared=(True,)),
        StationBackward(1 << 20, ((-1, 0),), {}, {}),
        End(),
    ],
    ids=lambda order: type(order).__name__,
)
def test_a_short_order_is_one_message_beside_its_tensors(order: Any) -> None:
    content = written(order)
    assert wire_bytes(order) == 64 + sum(tensor.nbytes for tensor in content.tensors)
    read, tensors = MessageReader[Any](StationOrder).read(content.text)
    assert type(read) is type(order)
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in content.tensors]


def test_orders_about_different_things_have_different_keys() -> None:
    orders = [HeldOrder(Read(aspect), name) for aspect in Aspect for name in ("a", "b")]
    orders += [of_all(verb) for verb in (Norm((), 2.0), Read(Aspect.STATE))]
    orders += [HeldOrder(MakeStep(n, Data(None), Data({}), {}), "", n) for n in (0, 1)]
    assert len({order.key for order in orders}) == len(orders)


def test_a_host_reads_writes_norms_scales_and_steps() -> None:
    parameter, held, answers = host()
    held.obey(HeldOrder(Write(Aspect.GRADIENT, Data(torch.tensor([3.0, 4.0]))), "a"))
    held.obey(HeldOrder(Push(None, torch.tensor([3.0, 4.0])), "a", cleared=(False,)))
    held.obey(of_all(Norm((), 2.0)))
    held.obey(of_all(ScaleBy((), torch.tensor(0.5))))
    held.obey(HeldOrder(Read(Aspect.GRADIENT), "a"))
    held.obey(of_all(MakeStep(0, Data(None), Data({}), {})))
    held.obey(HeldOrder(Read(Aspect.VALUES), "a"))
    norm, gradient, values = answers.posted
    assert float(norm) == pytest.approx(10.0)
    assert gradient.value.tolist() == [3.0, 4.0]
    assert values.value.tolist() == [1.5, 2.0]  # by the group's own rate
    held.obey(HeldOrder(Write(Aspect.VALUES, Data(torch.zeros(2))), "a"))
    assert parameter.tolist() == [0.0, 0.0]


def test_a_gradient_that_is_cleared_is_gone() -> None:
    parameter, held, _ = host()
    parameter.grad = torch.ones(2)
    held.obey(HeldOrder(Push(None, torch.ones(2)), "a", cleared=(True,)))
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "verb",
    [
        Sum(),
        Pull(torch.zeros(1)),
        Push(torch.zeros(1), torch.zeros(1)),
        Read(Aspect.RESIDUALS),
        Write(Aspect.ERROR_BOUND, Data(0.1)),
    ],
    ids=lambda verb: type(verb).__name__,
)
def test_a_verb_that_ranks_never_say_is_refused(verb: Verb) -> None:
    _, held, _ = host()
    with pytest.raises(WorldError, match="workers of this model do not say"):
        held.obey(HeldOrder(verb, "a"))


def test_content_of_another_form_is_refused() -> None:
    _, held, _ = host()
    with pytest.raises(WorldError, match="writes values of another form"):
        held.obey(HeldOrder(Write(Aspect.VALUES, Data("words")), "a"))
