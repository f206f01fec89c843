"""Messages as bytes: a text, which is plain data, and beside it the message's tensors.

The text is MessagePack. It has the types and shapes of the tensors, which cross by themselves, as
they lie in memory (channel.py). msgspec reads it into the types that the reader names. A field of
any form is plain data (contracts/plain.py). Nothing in a message is code, so reading runs nothing.
Guarded by tests/remote/test_wire.py.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import msgspec
import torch
from torch import Tensor

from shoal.contracts.plain import DTYPES, NUMBERS, Decoder, Encoder, NotPlain, form_of, not_sent

M = TypeVar("M")


class MessagePart(
    msgspec.Struct, frozen=True, array_like=True, eq=False, forbid_unknown_fields=True
):
    """Frozen data, as a field of a message."""


class Message(MessagePart, frozen=True, tag=True):
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

    def take(_: object, tensor: Tensor) -> list[int]:
        stands_for = form_of(tensor)
        tensors.append(tensor.detach().contiguous())
        return stands_for

    def hook(value: Any) -> Any:
        if isinstance(value, Tensor):
            return take((), value)
        if isinstance(value, torch.dtype):
            return NUMBERS[value]
        return Encoder(take).form(value.value if isinstance(value, Data) else value)

    try:
        text = msgspec.msgpack.encode(message, enc_hook=hook)
    except (NotPlain, msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise not_sent(str(error)) from error
    return Written(text, tuple(tensors))


@final
class MessageReader(Generic[M]):
    """Reads messages of some types; for one thread.

    Args:
        kind: a type of message, or a union of some.
    """

    def __init__(self, kind: Any) -> None:
        self._tensors: list[Tensor] = []
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._read_field)
        self._data = Decoder(self._tensor)

    def read(self, text: bytes) -> tuple[M, list[Tensor]]:
        """A message, and its tensors, which are still to be filled.

        Raises:
            ValueError: the text is no such message.
        """
        self._tensors = []
        try:
            message: M = self._decoder.decode(text)
        except Exception as error:  # any kind: the text may be anything
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return message, self._tensors

    def _read_field(self, kind: type, value: Any) -> Any:
        """Make the value of a field that MessagePack does not know."""
        if kind is Tensor:
            return self._tensor(value)
        return DTYPES[value] if kind is torch.dtype else Data(self._data.value(value))

    def _tensor(self, form: Sequence[int]) -> Tensor:
        number, *shape = form
        tensor = torch.empty(shape, dtype=DTYPES[number], device="cpu")
        self._tensors.append(tensor)
        return tensor
