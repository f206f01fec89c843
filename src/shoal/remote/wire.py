"""Messages as bytes: a text, which is plain data, and beside it the message's tensors.

The text is MessagePack. It has the types and shapes of the tensors, which cross by themselves, as
they lie in memory (channel.py). msgspec reads it into the types that the reader names. Nothing in
it is code, so reading runs nothing. What a message may hold: tensors, numbers, strings, bytes,
booleans, None, types of tensors, and lists, tuples and dicts of these. Guarded by
tests/remote/test_wire.py.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import UsageError

M = TypeVar("M")
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
# what begins a list in plain data: its kind
_LIST, _TUPLE, _DICT, _ORDERED_DICT, _TENSOR, _DTYPE = range(6)


class Record(msgspec.Struct, frozen=True, array_like=True, eq=False, forbid_unknown_fields=True):
    """Frozen data, as a field of a message."""


class Message(Record, frozen=True, tag=True):
    """Frozen data under the name of its class, which may cross."""


@final
class Data:
    """Plain data of any form, as a field of a message."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Written:
    """A message as bytes, and its tensors."""

    text: bytes
    tensors: tuple[Tensor, ...]


def written(message: Any) -> Written:
    """A message, or an answer, as bytes; its tensors must not change until they are sent.

    Raises:
        UsageError: something in it is not plain data.
    """
    tensors: list[Tensor] = []

    def form(tensor: Tensor) -> list[int]:
        if tensor.layout != torch.strided:
            raise _not_plain(f"a tensor of layout {tensor.layout}")
        tensors.append(tensor.detach().contiguous())
        return [_NUMBERS[tensor.dtype], *tensor.shape]

    def hook(value: Any) -> Any:
        if isinstance(value, Tensor):
            return form(value)
        if isinstance(value, torch.dtype):
            return _NUMBERS[value]
        return _lowered(value.value if isinstance(value, Data) else value, form)

    try:
        text = msgspec.msgpack.encode(message, enc_hook=hook)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise _not_plain(str(error)) from error
    return Written(text, tuple(tensors))


def _lowered(value: Any, form: Callable[[Tensor], list[int]]) -> Any:
    """Plain data as MessagePack knows it: a list begins with the number of its kind."""
    if value is None or isinstance(value, bool | bytes):
        return value
    for kind in (str, int, float):  # also what derives from them
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic):
        return _lowered(value.item(), form)
    if isinstance(value, Tensor):
        return [_TENSOR, form(value)]
    if isinstance(value, torch.dtype):
        return [_DTYPE, _NUMBERS[value]]
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        return [_LIST if kind is list else _TUPLE, *(_lowered(item, form) for item in value)]
    if kind in (dict, OrderedDict):
        parts = (_lowered(part, form) for item in value.items() for part in item)
        return [_DICT if kind is dict else _ORDERED_DICT, *parts]
    raise _not_plain(f"a {kind.__module__}.{kind.__qualname__}")


def _not_plain(found: str) -> UsageError:
    return UsageError(
        "this cannot be sent to another host",
        got=found[:200],
        expected="tensors, numbers, strings, bytes, booleans, None, and lists, tuples and dicts "
        "of these",
        do="make plain data of it",
    )


@final
class Reader(Generic[M]):
    """Reads messages of some types; for one thread.

    Args:
        kind: a type of message, or a union of some.
    """

    def __init__(self, kind: Any) -> None:
        self._tensors: list[Tensor] = []
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._raised)

    def read(self, text: bytes) -> tuple[M, list[Tensor]]:
        """A message, and its tensors, which are still to be filled.

        Raises:
            ValueError: the text is no such message.
        """
        self._tensors = []
        try:
            message: M = self._decoder.decode(text)
        except Exception as error:  # of whatever kind: the text may be anything
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return message, self._tensors

    def _raised(self, kind: type, value: Any) -> Any:
        """What a field of a message is that MessagePack does not know."""
        if kind is Tensor:
            return self._tensor(value)
        return _DTYPES[value] if kind is torch.dtype else Data(self._plain(value))

    def _plain(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        kind, *parts = value
        if kind == _TENSOR:
            return self._tensor(*parts)
        if kind == _DTYPE:
            return _DTYPES[parts[0]]
        plain = [self._plain(part) for part in parts]
        if kind in (_LIST, _TUPLE):
            return plain if kind == _LIST else tuple(plain)
        if kind in (_DICT, _ORDERED_DICT):
            pairs = zip(plain[::2], plain[1::2], strict=True)
            return dict(pairs) if kind == _DICT else OrderedDict(pairs)
        raise ValueError(f"no kind of data has the number {kind!r}")

    def _tensor(self, form: Sequence[int]) -> Tensor:
        number, *shape = form
        tensor = torch.empty(shape, dtype=_DTYPES[number], device="cpu")
        self._tensors.append(tensor)
        return tensor
