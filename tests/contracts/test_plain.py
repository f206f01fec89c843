"""Plain data in parcels: what is read is what was packed, and a stranger's bytes run nothing."""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.contracts.plain import packed, unpacked
from shoal.core.errors import UsageError
from shoal.core.plan import Choice, Plan


@dataclass(frozen=True)
class Inner:
    """Found by the hints of what holds it."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    """Read where a reader's own value has one, or where it is named."""

    inner: Inner | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stranger:
    """Nobody names it."""

    what: str = ""


class Named(NamedTuple):
    """Would come back as a plain tuple."""

    one: int


def back(value: Any, *kinds: type) -> Any:
    return unpacked(*packed(value, kinds))


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, [2.5, "ä", b"\xff"], {"a": (True,)}),
        [{1, 2}, Counter("ab"), {("a", 1): frozenset((3,))}, 1 + 2j, torch.device("cpu")],
        Outer(Inner(("x",)), {"a": [0.1, float("inf")]}),
        [Outer(), Inner()],
        Plan(2, "digest", (Choice("layer", "replicate", "ring"),), 1 << 20, 2, placement={"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_another_object(value: Any) -> None:
    read = back(value)
    assert (read, type(read)) == (value, type(value))
    assert read is not value or value is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_cross_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3).to(dtype).t()  # not contiguous
    value = {"a": [tensor, torch.empty(0, 4)], "b": (tensor[0, 0],)}
    read = back(value)
    assert torch.equal(read["a"][0], tensor) and read["a"][0].dtype == dtype
    assert read["a"][1].shape == (0, 4)
    assert torch.equal(read["b"][0], tensor[0, 0]) and read["b"][0].shape == ()
    read["a"][0].zero_()
    assert tensor.any()


def test_bytes_behind_a_parcel_are_not_read() -> None:
    parcel, records = packed([torch.ones(3), "text"])
    read = unpacked(torch.cat([parcel, torch.full((100,), 7, dtype=torch.uint8)]), records)
    assert torch.equal(read[0], torch.ones(3)) and read[1] == "text"


def test_a_dataclass_is_read_where_the_reader_names_it_only() -> None:
    parcel, _ = packed(Outer(Inner(("x",))))
    assert unpacked(parcel, packed(None, [Outer])[1]) == Outer(Inner(("x",)))
    assert unpacked(parcel, packed(Outer())[1]) == Outer(Inner(("x",)))
    for records in (packed(None)[1], packed(Inner(), [Stranger])[1]):
        with pytest.raises(ValueError, match="the name"):
            unpacked(parcel, records)


@pytest.mark.parametrize(
    "value",
    [print, object(), torch.eye(2).to_sparse(), 2**64, UsageError("x"), Named(1)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        packed([value])


def test_the_error_says_where_the_value_is() -> None:
    with pytest.raises(UsageError, match=r"got: groups\.1\.hook: a builtins\.object"):
        packed({"groups": [{}, {"hook": object()}]})


class Evil:
    """Runs code where a pickle of it is read."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def parcel_of(text: bytes) -> Tensor:
    head = len(text).to_bytes(8, "big") + text
    return torch.frombuffer(bytearray(head), dtype=torch.uint8)


def encoded(value: Any) -> Tensor:
    return parcel_of(msgspec.msgpack.encode(value))


BAD = {
    "nothing": torch.empty(0, dtype=torch.uint8),
    "zeros": torch.zeros(2000, dtype=torch.uint8),
    "a length that is not there": torch.full((100,), 255, dtype=torch.uint8),
    "a pickle": parcel_of(pickle.dumps(Evil())),
    "a pickle alone": torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8),
    "a tensor of more than came": encoded({"$": "tensor", "name": [0, 2**62]}),
    "a tensor of more than a number holds": encoded({"$": "tensor", "name": [0, 2**62, 2**62]}),
    "a negative shape": encoded({"$": "tensor", "name": [0, -1]}),
    "two negative shapes": encoded({"$": "tensor", "name": [0, -1, -1]}),
    "no such type": encoded({"$": "tensor", "name": [1000]}),
    "no such kind": encoded({"$": "code", "value": "1"}),
    "a class by name": encoded({"$": "record", "of": "os.system", "items": ["true"]}),
    "a class that is no dataclass": encoded({"$": "record", "of": "builtins.eval", "items": [1]}),
    "a field too many": encoded({"$": "record", "of": f"{__name__}.Inner", "items": [[1], 2]}),
    "too deep": parcel_of(b"\x91" * 100_000 + b"\xc0"),
}


@pytest.mark.parametrize("parcel", BAD.values(), ids=BAD)
def test_what_is_no_parcel_is_refused(parcel: Tensor) -> None:
    with pytest.raises(ValueError):
        unpacked(parcel, packed(None, [Outer])[1])


def test_parcels_with_faults_only_ever_raise_one_error() -> None:
    draw = random.Random(0)
    parcel, records = packed([Outer(Inner(("x",))), torch.arange(5), {"a": (1, [torch.ones(2)])}])
    refused = 0
    for _ in range(2000):
        faulty = parcel.clone()
        for _ in range(draw.randrange(1, 4)):
            faulty[draw.randrange(len(faulty))] = draw.randrange(256)
        try:
            unpacked(faulty, records)
        except ValueError:
            refused += 1
    assert refused > 500


def test_ranks_whose_own_value_has_none_read_what_they_name() -> None:
    def told(comm: ThreadComm) -> list[Any]:
        return comm.gather_objects(Outer() if comm.rank == 0 else None, "set-up", Outer)

    assert run(2, told) == [[Outer(), None]] * 2
