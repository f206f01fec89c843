"""A bit that flips at each place where a number of training is: what the check of replicas finds.

It compares copies. So it finds what makes ranks differ, and nothing that reaches all of them alike:
a number on its way into a sum, what a codec owes, what an owner has. docs/lab/replicas.md has the
table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_replicas import EVERY, Script, on_ranks
from torch import Tensor

from shoal.codecs.carrier_memory import coded_carriers
from shoal.codecs.runs import LOST
from shoal.comm.threads import ThreadComm
from shoal.session.session import current
from shoal_tools.testing.planned_faults import flip

AT = 11  # an element
Flip = Callable[[Script, int], None]


def carriers(script: Script) -> Iterator[Any]:
    attached = current().attached.get(script.model)
    assert attached is not None
    for transfer in attached.engine.transfers:
        if hasattr(transfer, "carrier"):
            yield transfer.carrier


def of_weight(script: Script, bit: int) -> None:
    flip(script.model[2].weight, AT, bit)


def of_moment(script: Script, bit: int) -> None:
    flip(script.optimizer.state[script.model[2].weight]["exp_avg"], AT, bit)


def of_residual(script: Script, bit: int) -> None:
    attached = current().attached.get(script.model)
    assert attached is not None
    for carrier in coded_carriers(attached.engine.transfers):
        for (leg, rank), memory in carrier._memory.items():
            if leg == "scatter" and LOST in memory and len(memory[LOST]) > AT and rank != 1:
                flip(memory[LOST], AT, bit)
                return
    raise AssertionError("nothing is owed")


def around(name: str, before: bool, own: bool = False) -> Flip:
    """Flip once, before or behind a carrier's method; in this rank's own slice, or another's."""

    def of_bucket(script: Script, bit: int) -> None:
        carrier = max(carriers(script), key=lambda found: len(found.bucket.flat))
        method, places = getattr(carrier, name), [1 if own else 0]

        def flipped(comm: Any) -> None:
            while before and places:
                flip(carrier.bucket.values(places.pop()), AT, bit)
            method(comm)
            while places:
                flip(carrier.bucket.values(places.pop()), AT, bit)

        setattr(carrier, name, flipped)

    return of_bucket


# where it is, the layers' way, and whether the next check finds that ranks differ
PLACES: dict[str, tuple[str, Flip, bool]] = {
    "weight": ("replicate", of_weight, True),
    "optimizer's state": ("replicate", of_moment, True),
    "received sum": ("replicate:direct+int8(block=8)", around("gather", before=False), True),
    "bucket before sending": (
        "replicate:direct+int8(block=8)",
        around("reduce", before=True),
        False,
    ),
    "sum at its owner": (
        "replicate:direct+int8(block=8)",
        around("gather", before=True, own=True),
        False,
    ),
    "residual": ("replicate:direct+int8(block=8)", of_residual, False),
    "owner's copy of a weight": ("sliced", of_weight, False),
}


def trained(way: str, fault: Flip | None, bit: int) -> Sequence[list[Tensor]]:
    """Flip a bit on rank 1 of three, and train until the check behind it is over."""

    def script(comm: ThreadComm) -> list[Tensor]:
        script = Script(comm.rank, way)
        script.steps(2 * EVERY - 1)
        if comm.rank == 1 and fault is not None:
            fault(script, bit)
        script.steps(1)
        if fault is not None and fault is not of_weight and fault is not of_moment:
            script.steps(EVERY)
        return [weight.detach().clone() for weight in script.model.parameters()]

    return on_ranks(3, script)


@pytest.mark.parametrize("bit", [22, 29], ids=["mantissa", "exponent"])
@pytest.mark.parametrize("place", PLACES)
def test_what_makes_ranks_differ_is_found_and_healed(
    place: str, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    way, fault, is_found = PLACES[place]
    first, *others = trained(way, fault, bit)
    for other in others:
        assert all(map(torch.equal, first, other))
    said = [r.getMessage() for r in caplog.records if "had other bits than most" in r.getMessage()]
    assert bool(said) == is_found, said
    assert all("rank 1 (host h1)" in line for line in said)


@pytest.mark.parametrize("place", ["bucket before sending", "sum at its owner", "residual"])
def test_what_reaches_all_ranks_alike_changes_training(place: str) -> None:
    """So the table does not say of a fault that never struck that nobody found it."""
    way, fault, _ = PLACES[place]
    sound, struck = trained(way, None, 29), trained(way, fault, 29)
    assert not all(map(torch.equal, sound[0], struck[0]))
