"""Plain data as MessagePack: what ranks and hosts tell each other, and nothing in it is code.

    None, booleans, numbers, text, bytes          as they are
    list, tuple, dict, OrderedDict                a list that begins with the number of its kind
    a tensor, or a type of tensors                its form; the elements cross beside the text
    a dataclass that the reader knows by name     its name and its fields

Why here: a pickle runs what its writer likes, and whoever reaches a port may be its writer. The
reader makes these forms only. It makes a dataclass only if its own program names it, or has one in
the value that it gives itself. What derives from a number, text or a scalar of numpy arrives plain.
Guarded by tests/contracts/test_plain.py and tests/remote/test_wire.py.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import UsageError

DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
# what begins a list in plain data: its kind
_LIST, _TUPLE, _DICT, _ORDERED_DICT, _TENSOR, _DTYPE, _RECORD = range(7)
_LENGTH_BYTES = 8  # of the text, before it in a parcel


def lowered(
    value: Any, form: Callable[[Tensor], Any], records: Callable[[type], object] | None = None
) -> Any:
    """Plain data as MessagePack knows it.

    Args:
        value: what is to be sent.
        form: says what stands for a tensor.
        records: told of each type of dataclass that is met; None where these are refused.

    Raises:
        UsageError: something in it is not plain data.
    """
    if value is None or isinstance(value, bool | bytes):
        return value
    for kind in (str, int, float):  # also what derives from them
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic):
        return lowered(value.item(), form, records)
    if isinstance(value, Tensor):
        return [_TENSOR, form(value)]
    if isinstance(value, torch.dtype):
        return [_DTYPE, NUMBERS[value]]
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        items = (lowered(item, form, records) for item in value)
        return [_LIST if kind is list else _TUPLE, *items]
    if kind in (dict, OrderedDict):
        parts = (lowered(part, form, records) for item in value.items() for part in item)
        return [_DICT if kind is dict else _ORDERED_DICT, *parts]
    if dataclasses.is_dataclass(kind) and records is not None:
        records(kind)
        parts = (lowered(getattr(value, name), form, records) for name in _fields(kind))
        return [_RECORD, _name(kind), *parts]
    raise not_plain(f"a {_name(kind)}")


def raised(
    value: Any, tensor: Callable[[Sequence[int]], Tensor], records: Mapping[str, type]
) -> Any:
    """What `lowered` made of plain data, as it was.

    Args:
        value: lists, numbers and texts.
        tensor: makes the tensor of a form.
        records: the types of dataclasses that may be made, by name.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    kind, *parts = value
    if kind == _TENSOR:
        return tensor(*parts)
    if kind == _DTYPE:
        return DTYPES[parts[0]]
    plain = [raised(part, tensor, records) for part in parts]
    if kind in (_LIST, _TUPLE):
        return plain if kind == _LIST else tuple(plain)
    if kind in (_DICT, _ORDERED_DICT):
        pairs = zip(plain[::2], plain[1::2], strict=True)
        return dict(pairs) if kind == _DICT else OrderedDict(pairs)
    if kind == _RECORD and plain[0] in records:
        record = records[plain[0]]
        return record(**dict(zip(_fields(record), plain[1:], strict=True)))
    raise ValueError(f"no kind of data has the number {kind!r}, or the name {plain[:1]}")


def form_of(tensor: Tensor) -> list[int]:
    """What stands for a tensor: its type and shape.

    Raises:
        UsageError: it is sparse, or otherwise not laid out by strides.
    """
    if tensor.layout != torch.strided:
        raise not_plain(f"a tensor of layout {tensor.layout}")
    return [NUMBERS[tensor.dtype], *tensor.shape]


def not_plain(found: str) -> UsageError:
    """The error about a value that is no plain data."""
    return UsageError(
        "this cannot be sent to another host",
        got=found[:200],
        expected="tensors, numbers, strings, bytes, booleans, None, and lists, tuples and dicts "
        "of these",
        do="make plain data of it",
    )


def packed(value: Any, kinds: Iterable[type] = ()) -> tuple[Tensor, dict[str, type]]:
    """A value as bytes in one tensor, and the dataclasses that an answer may have.

        length of the text, 8 bytes │ text │ elements of the first tensor │ of the second │ …

    Args:
        value: plain data, also with dataclasses.
        kinds: types of dataclasses that others may send where this value has none.

    Raises:
        UsageError: something in it is not plain data.
    """
    found = set(kinds)
    tensors: list[Tensor] = []

    def form(tensor: Tensor) -> list[int]:
        stands_for = form_of(tensor)
        tensors.append(tensor.detach().cpu().contiguous())
        return stands_for

    try:
        text = msgspec.msgpack.encode(lowered(value, form, found.add))
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise not_plain(str(error)) from error
    head = len(text).to_bytes(_LENGTH_BYTES, "big") + text
    parcel = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    if tensors:
        parcel = torch.cat([parcel, *(tensor.view(-1).view(torch.uint8) for tensor in tensors)])
    return parcel, {_name(kind): kind for of_one in found for kind in _named_by(of_one)}


def unpacked(parcel: Tensor, records: Mapping[str, type]) -> Any:
    """The value that was `packed`; bytes behind it are not read.

    Raises:
        ValueError: the bytes are no such value, whatever else they are.
    """
    data = parcel.numpy()
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "big")
    begin = end if end <= len(data) else len(data)  # of the elements that no tensor has yet

    def tensor(form: Sequence[int]) -> Tensor:
        nonlocal begin
        number, *shape = form
        dtype = DTYPES[number]
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if not 0 <= nbytes <= len(data) - begin or min(shape, default=0) < 0:
            raise ValueError(f"a tensor of {nbytes} bytes where {len(data) - begin} came")
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        whole.view(-1).view(torch.uint8).copy_(parcel[begin : begin + nbytes])
        begin += nbytes
        return whole

    try:
        return raised(msgspec.msgpack.decode(data[_LENGTH_BYTES:end].tobytes()), tensor, records)
    except Exception as error:  # of whatever kind: the bytes may be anything
        raise ValueError(f"{type(error).__name__}: {error}"[:500]) from error


@cache
def _named_by(kind: type) -> frozenset[type]:
    """This dataclass, and those that its fields may hold."""
    found: set[type] = set()
    left: list[Any] = [kind]
    while left:
        kind = left.pop()
        left += get_args(kind)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in found:
            found.add(kind)
            left += get_type_hints(kind).values()
    return frozenset(found)


@cache
def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
