"""Messages as bytes: what is read is what was written, and anything else is refused."""

from __future__ import annotations

import os
import pickle
import random
import threading
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.errors import UsageError
from shoal.remote.wire import Data, Message, MessageReader, written


class Pull(Message):
    table: int
    ids: Tensor


class Push(Message):
    table: int
    rows: Tensor | None
    dtype: torch.dtype
    given: Data
    slopes: dict[int, Tensor]
    flags: tuple[bool, ...]


def back(message: Any, kind: Any = Pull | Push) -> Any:
    """A message, written and read, with its tensors filled."""
    content = written(message)
    read, tensors = MessageReader[Any](kind).read(content.text)
    for tensor, sent in zip(tensors, content.tensors, strict=True):
        tensor.copy_(sent)
    return read


def test_a_message_is_read_as_it_was_written() -> None:
    rows, slope = torch.randn(3, 2, dtype=torch.float64), torch.tensor(2.0)
    push = back(Push(7, rows, torch.bfloat16, Data({"lr": 0.1}), {4: slope}, (True, False)))
    assert (push.table, push.dtype, push.flags) == (7, torch.bfloat16, (True, False))
    assert push.given.value == {"lr": 0.1}
    assert torch.equal(push.rows, rows) and push.rows.dtype == rows.dtype
    assert torch.equal(push.slopes[4], slope) and push.slopes[4].shape == ()
    assert back(Push(7, None, torch.int8, Data(None), {}, ())).rows is None
    assert isinstance(back(Pull(1, torch.arange(0))), Pull)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        2**64 - 1,
        0.1,
        float("inf"),
        "ä",
        b"\x00\xff",
        [],
        (),
        {},
        [1, (2, [3.0, None]), {"a": (False,)}],
        {("a", 1): [torch.float16], 3: {}},
        OrderedDict(b=1, a=2),
        {"betas": (0.9, 0.999), "foreach": None},
        [{1, 2}, Counter("ab")],
        {"$": "tensor", "name": 1},
    ],
    ids=repr,
)
def test_plain_data_keeps_its_types(value: Any) -> None:
    read = back(Data(value), Data).value
    assert repr(read) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_in_plain_data_cross(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 3).to(dtype).t()  # not contiguous
    read = back(Data({"state": [tensor, (tensor[0], torch.empty(0, 4))]}), Data).value["state"]
    assert torch.equal(read[0], tensor) and torch.equal(read[1][0], tensor[0])
    assert read[0].dtype == dtype and read[1][1].shape == (0, 4)


def test_an_array_crosses() -> None:
    read = back(Data(np.arange(3, dtype=np.int32)), Data).value
    assert read.dtype == np.int32 and read.tolist() == [0, 1, 2]


def test_numbers_of_other_libraries_become_plain() -> None:
    read = back(Data([np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True)]), Data).value
    assert [type(each) for each in read] == [float, float, int, bool]
    assert read == [0.1, 0.5, 3, True]


class Pair(NamedTuple):
    one: int
    other: int


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        print,
        defaultdict(int),
        Pair(1, 2),
        object,
        2**64,
        torch.eye(2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        written(Data({"a": [value]}))


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="cannot be sent"):
        written(Data(value))


class Evil:
    """Runs code where a pickle of it is read."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def push_of(data: Any) -> bytes:
    """The text of a push with such data."""
    return msgspec.msgpack.encode(["Push", 1, None, 0, data, {}, []])


MALFORMED = {
    "nothing": b"",
    "a pickle": pickle.dumps(Evil()),
    "an unknown type": msgspec.msgpack.encode(["Run", 1, [0, 3]]),
    "no type": msgspec.msgpack.encode([1, [0, 3]]),
    "a field too few": msgspec.msgpack.encode(["Pull", 1]),
    "a field too many": msgspec.msgpack.encode(["Pull", 1, [0, 3], 4]),
    "another type of field": msgspec.msgpack.encode(["Pull", "1", [0, 3]]),
    "no such type of tensor": msgspec.msgpack.encode(["Pull", 1, [1000, 3]]),
    "a negative shape": msgspec.msgpack.encode(["Pull", 1, [0, -3]]),
    "a shape that is none": msgspec.msgpack.encode(["Pull", 1, ["a", {}]]),
    "no memory for it": msgspec.msgpack.encode(["Pull", 1, [0, 2**62, 2**62]]),
    "no such kind of data": push_of({"$": "code"}),
    "data of no kind": push_of({"$": None}),
    "a record": push_of({"$": "record", "of": "builtins.eval", "items": ["1"]}),
    "half a pair": push_of({"$": "dict", "pairs": [[1]]}),
    "a list as a key": push_of({"$": "dict", "pairs": [[[0], 1]]}),
    "a date": msgspec.msgpack.encode(["Push", 1, None, 0, msgspec.msgpack.Ext(5, b"x"), {}, []]),
    "too deep": b"\x91" * 100_000 + b"\x00",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        MessageReader[Any](Pull | Push).read(text)


def test_bytes_drawn_at_random_and_messages_with_faults_only_ever_raise_one_error() -> None:
    draw, reader = random.Random(0), MessageReader[Any](Pull | Push)
    rows = torch.zeros(2, 2)
    texts = [
        written(message).text
        for message in (
            Pull(3, torch.arange(5)),
            Push(1, rows, torch.float32, Data({"a": (1, [rows])}), {1: rows}, (True,)),
        )
    ]
    refused = 0
    for number in range(4000):
        text = bytearray(draw.choice(texts) if number % 2 else draw.randbytes(draw.randrange(80)))
        for _ in range(draw.randrange(1, 4) if number % 2 else 0):
            text[draw.randrange(len(text))] = draw.randrange(256)
        try:
            message, tensors = reader.read(bytes(text))
        except ValueError:
            refused += 1
        else:  # a fault that makes another message of the same form
            assert isinstance(message, Pull | Push)
            assert all(type(each) is Tensor for each in tensors)
    assert refused > 2000
