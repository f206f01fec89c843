"""The vocabulary: short verbs take 64 bytes; hosts refuse verbs and contents that do not fit."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from wire_sizes import wire_bytes

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import WorldError
from shoal.remote.channel import Channel
from shoal.remote.orders import TableForm
from shoal.remote.verbs import (
    Aspect,
    End,
    Held,
    MakeStep,
    Norm,
    PartOrder,
    PieceOrder,
    Pull,
    Push,
    Read,
    Residuals,
    ScaleBy,
    States,
    Sum,
    Values,
    Verb,
    Write,
)
from shoal.remote.wire import Data, MessageReader, written
from shoal.servers.ahead_workers import AheadModel
from shoal.servers.geo import GeoModel
from shoal.servers.step_workers import InStep
from shoal.servers.tables import ServedTables

ROWS, LAST = 1 << 30, 1 << 20  # of a table; the number of the last one
HELD: Held = ((0,),)
IDS = torch.empty(ROWS, dtype=torch.int64, device="meta")
GRADIENTS = torch.empty(ROWS, 1 << 16, device="meta")
OF_TABLE: list[Verb] = [
    Pull(IDS),
    Push(IDS, GRADIENTS),
    MakeStep(3, Data(None), Data(None), {}),
    Read(Aspect.VALUES),
    Read(Aspect.GRADIENT),
    Read(Aspect.STATE, 3),
    Write(Aspect.VALUES, Data(GRADIENTS)),
    Write(Aspect.GRADIENT, Data(None)),
    Norm(((0, 0),), 2.0),
    ScaleBy(((0, 0),), torch.tensor(0.5)),
]
ONE_OF_EACH: list[Verb] = [
    Sum(),
    Pull(torch.zeros(1)),
    Push(torch.zeros(1), torch.zeros(1, 1)),
    MakeStep(0, Data([]), Data({}), {0: {1: PieceOrder(0, True, None)}}),
    *(Read(aspect) for aspect in Aspect),
    *(Write(aspect, Data(None)) for aspect in Aspect),
    Norm((), 2.0),
    ScaleBy((), torch.tensor(0.5)),
]


def name(verb: Any) -> str:
    """The verb, and what it is about."""
    words = [type(verb).__name__, *([verb.aspect.name] if isinstance(verb, Read | Write) else [])]
    return " ".join(words)


@pytest.mark.parametrize("verb", OF_TABLE, ids=name)
def test_a_verb_to_a_table_takes_64_bytes_beside_its_tensors(verb: Verb) -> None:
    order = PartOrder(LAST, HELD, verb)
    content = written(order)
    assert wire_bytes(order) == 64 + sum(tensor.nbytes for tensor in content.tensors)
    if not any(tensor.is_meta for tensor in content.tensors):
        read, _ = MessageReader[Any](PartOrder | End).read(content.text)
        assert (read.part, read.held, type(read.verb)) == (LAST, HELD, type(verb))


@pytest.mark.parametrize("verb", ONE_OF_EACH, ids=name)
def test_every_verb_crosses(verb: Verb) -> None:
    content = written(PartOrder(0, None, verb))
    read, tensors = MessageReader[Any](PartOrder | End).read(content.text)
    assert name(read.verb) == name(verb)
    assert len(tensors) == len(content.tensors)


def test_one_of_each_is_all_of_the_vocabulary() -> None:
    assert {type(verb) for verb in ONE_OF_EACH} == set(get_args(Verb))


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (torch.ones(2), Values),
        ({0: {0: 1.0}}, Values),
        ([torch.ones(1)], States),
        ({"w": torch.ones(1)}, Residuals),
        ("large", float),
        (None, Tensor),
    ],
)
def test_a_content_of_another_form_is_refused(content: Any, kind: Any) -> None:
    read, _ = MessageReader[Any](Write).read(written(Write(Aspect.VALUES, Data(content))).text)
    with pytest.raises(WorldError, match=r"writes values of another form[\s\S]*same version"):
        read.holds(kind)


def test_a_content_arrives_as_it_was_written() -> None:
    states = [{1: {"step": torch.tensor(3.0), "betas": (0.9, 0.99), "name": None}}]
    read, (step,) = MessageReader[Any](Write).read(
        written(Write(Aspect.STATE, Data(states), 2)).text
    )
    step.fill_(3.0)
    assert read.optimizer == 2
    assert read.holds(States) == (states[0],)


def refused(obey: Any) -> set[str]:
    """The verbs that a host without transfers refuses as ones that its workers never say."""
    names = set()
    for verb in ONE_OF_EACH:
        try:
            obey(verb)
        except WorldError as error:
            if "which workers of this model do not say" in str(error):
                names.add(name(verb))
        except (IndexError, RuntimeError):
            pass  # it has no optimizer, or no parameter, but it takes the verb
    return names


def test_each_host_refuses_verbs_that_its_workers_never_say() -> None:
    comm = ThreadComm()
    in_step = InStep((), (), [comm], [comm])
    assert refused(in_step.obey) == {
        "Pull",
        "Push",
        "Read VALUES",
        "Read ERROR_BOUND",
        "Write GRADIENT",
    }
    in_step.close()
    ahead = AheadModel((), (), [comm], [comm], comm, 1)
    assert refused(ahead.obey) == {name(verb) for verb in ONE_OF_EACH} - {
        "Sum",
        "Read STATE",
        "Read VALUES",
        "Write STATE",
        "Write VALUES",
    }
    ahead.close()


@pytest.mark.parametrize(
    "verb", [Sum(), Read(Aspect.RESIDUALS), Write(Aspect.ERROR_BOUND, Data(1.0))], ids=name
)
def test_a_table_refuses_verbs_that_its_workers_never_say(verb: Verb) -> None:
    def work(comm: ThreadComm) -> None:
        if comm.rank:
            tables = ServedTables(comm, [TableForm("table", 4, 2, torch.float32)], (), 0)
            tables.finish(lambda: None)
            return
        channel = Channel[Any](comm, 1)
        channel.post(PartOrder(0, HELD, verb))
        channel.post(End())
        channel.settle()

    with pytest.raises(WorldError, match=f"asked for {type(verb).__name__}.* do not say"):
        run(2, work, timeout_s=10, servers=1)


@pytest.mark.parametrize(
    "verb",
    [
        Norm((), 2.0),
        Read(Aspect.STATE),
        Push(torch.zeros(1, dtype=torch.int64), torch.zeros(3)),
        Write(Aspect.VALUES, Data(None)),
    ],
    ids=name,
)
def test_weights_of_workers_that_step_by_themselves_refuse_other_verbs(verb: Verb) -> None:
    def work(comm: ThreadComm) -> None:
        if comm.rank:
            GeoModel([torch.zeros(3)], [comm], 0).finish(lambda: None)
            return
        channel = Channel[Any](comm, 1)
        channel.post(PartOrder(0, None, verb))
        channel.post(End())
        channel.settle()

    with pytest.raises(WorldError, match=r"do not say|writes values of another form"):
        run(2, work, timeout_s=10, servers=1)
