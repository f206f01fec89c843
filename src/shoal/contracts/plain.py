"""Plain data, with tensors beside it: the one encoder of messages, parcels and checkpoints.

    None, booleans, whole numbers, text, finite numbers    as they are
    lists, and dicts with text as keys                     as they are
    all else that is known                                 {"$": its kind, …}
    a tensor                                               {"$": "tensor", "name": …}
    a dataclass that the reader knows by name              {"$": "record", "of": its name, …}

The form is the same everywhere. A checkpoint writes it as JSON, and keeps tensors in a file, by
name (checkpoint/tree.py). Ranks and hosts tell it each other as MessagePack: a tensor's name is its
type and shape, and its elements cross beside the text (`packed`, remote/wire.py).

Nothing in it is code. A pickle runs any code of its writer, and any host that reaches a port may
write one.
The reader makes these forms only. It makes a dataclass only if its own program names it, or has one
in the value that it gives itself. Classes that derive from a number or text, and scalars of numpy,
arrive plain. Guarded by tests/contracts/test_plain.py, tests/remote/test_wire.py and
tests/checkpoint/test_tree.py.
Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

import base64
import dataclasses
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import UsageError

KIND = "$"
MOST_KEYS = 200  # the reader calls itself once for each key on the way to a value
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
Path = tuple[str, ...]  # keys that lead to a value

_MOST_BITS = 8192  # longest whole number; Python reads no text of 4,300 digits or more
_LENGTH_BYTES = 8  # the length of the text, before it in a parcel
_DTYPE_NAMES = {str(dtype): dtype for dtype in DTYPES}
_PLAIN = (
    "tensors, numbers, strings, bytes, booleans, None, and lists, tuples, sets and dicts of these"
)
_LISTS: dict[str, type] = {
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": dict,  # code makes its missing values
}
_OTHERS: dict[str, Callable[[str], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": base64.b64decode,
    "dtype": _DTYPE_NAMES.__getitem__,
    "device": torch.device,
}


class NotPlain(ValueError):
    """A value that is no plain data.

    Args:
        path: the keys that lead to it.
        got: the value in words.
        expected: the values that are.
    """

    def __init__(self, path: Path, got: str, expected: str = _PLAIN) -> None:
        super().__init__(f"{'.'.join(path)}: {got}" if path else got)
        self.path, self.got, self.expected = path, got, expected


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Writes values as plain data.

    Args:
        take: is given each tensor with its path, and returns its name.
        tensors: types of values that it takes.
        records: told of each type of dataclass that is met; None where these are refused.
        exact: whether a value is refused that would come back as one of another type, such as a
            named tuple, which comes back as a tuple.
    """

    take: Callable[[Path, Any], Any]
    tensors: tuple[type, ...] = (Tensor,)
    records: Callable[[type], object] | None = None
    exact: bool = True

    def form(self, value: Any, path: Path = ()) -> Any:
        """Return the plain form of a value.

        Raises:
            NotPlain: something in it has none.
        """
        if len(path) > MOST_KEYS:
            got = f"more than {MOST_KEYS} values within one another, or one within itself"
            raise NotPlain(path[:4], got, "")
        if value is None or isinstance(value, bool):  # save 7
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return _checked_int(int(value), path)
        if isinstance(value, float):
            number = float(value)
            finite = number - number == 0
            return number if finite else {KIND: "float", "value": repr(number)}
        if isinstance(value, self.tensors):
            return {KIND: "tensor", "name": self.take(path, value)}  # save 8
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if isinstance(value, tuple) or kind in _LISTS.values():
            return self._list(value, kind.__name__, path)
        if isinstance(value, Mapping):
            return self._dict(value, kind.__name__, path)
        return self._other(value, path)

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self.form(item, (*path, str(i))) for i, item in enumerate(values)]

    def _list(self, value: Any, kind: str, path: Path) -> Any:
        if self.exact and type(value) is not _LISTS.get(kind):
            raise NotPlain(path, f"a {_name(type(value))}")
        return {KIND: kind if kind in _LISTS else "tuple", "items": self._items(value, path)}

    def _dict(self, value: Mapping[Any, Any], kind: str, path: Path) -> Any:
        if self.exact and type(value) is not _DICTS.get(kind):
            raise NotPlain(path, f"a {_name(type(value))}")
        kind = kind if kind in _DICTS else "dict"
        parts = [(key, self.form(part, (*path, str(key)))) for key, part in value.items()]
        are_text = all(isinstance(key, str) for key, _ in parts) and KIND not in value
        if are_text and kind == "dict":
            return dict(parts)
        form: dict[str, Any] = {KIND: kind}
        if versions := _versions(value):
            form["versions"] = versions
        if are_text:
            return {**form, "values": dict(parts)}
        return {**form, "pairs": [[self.form(key, path), part] for key, part in parts]}

    def _other(self, value: Any, path: Path) -> Any:
        if isinstance(value, bytes):
            return {KIND: "bytes", "value": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {KIND: "complex", "value": repr(value)}
        if isinstance(value, torch.dtype):
            return {KIND: "dtype", "value": str(value)}
        if isinstance(value, torch.device):
            return {KIND: "device", "value": str(value)}
        if isinstance(value, np.generic):
            return self.form(value.item(), path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {KIND: "array", "name": self.take(path, torch.tensor(value, device="cpu"))}
        kind = type(value)
        if dataclasses.is_dataclass(kind) and self.records is not None:
            self.records(kind)
            items = self._items((getattr(value, field) for field in _fields(kind)), path)
            return {KIND: "record", "of": _name(kind), "items": items}
        raise NotPlain(path, f"a {_name(kind)}")


def _checked_int(value: int, path: Path) -> int:
    if value.bit_length() > _MOST_BITS:
        got = f"a whole number of {value.bit_length()} bits"
        raise NotPlain(path, got, f"at most {_MOST_BITS} bits")
    return value


def _versions(value: Any) -> dict[str, int]:
    """Versions of the modules of a state_dict, but for versions of 1."""
    metadata = getattr(value, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return {}
    found = {name: facts.get("version") for name, facts in metadata.items()}
    return {name: version for name, version in found.items() if version not in (None, 1)}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Reads the values that an `Encoder` wrote. Any error says that a form is none.

    Args:
        give: returns the tensor for which a name stands.
        records: the types of dataclasses that may be made, by name.
    """

    give: Callable[[Any], Tensor]
    records: Mapping[str, type] = dataclasses.field(default_factory=dict)

    def value(self, form: Any) -> Any:
        """Return the value of a plain form."""
        if isinstance(form, list):
            return [self.value(item) for item in form]
        if not isinstance(form, dict):
            if form is None or isinstance(form, str | int | float):
                return form
            raise ValueError(f"plain data has no {type(form).__name__}")
        if KIND not in form:
            return {key: self.value(part) for key, part in form.items()}
        kind = form[KIND]
        if kind == "tensor":
            return self.give(form["name"])
        if kind == "array":
            return self.give(form["name"]).numpy()
        if kind in _LISTS:
            return _LISTS[kind](self.value(item) for item in form["items"])
        if kind in _DICTS:
            return self._dict(form)
        if kind in _OTHERS:
            return _OTHERS[kind](form["value"])
        if kind == "record" and form["of"] in self.records:
            record = self.records[form["of"]]
            items = [self.value(item) for item in form["items"]]
            return record(**dict(zip(_fields(record), items, strict=True)))
        raise ValueError(f"no kind of value has the name {form.get('of', kind)!r}")

    def _dict(self, form: Mapping[str, Any]) -> Any:
        pairs = form["pairs"] if "pairs" in form else form["values"].items()
        values = _DICTS[form[KIND]]({self._key(key): self.value(part) for key, part in pairs})
        if "versions" in form:
            values._metadata = OrderedDict(
                (name, {"version": version}) for name, version in form["versions"].items()
            )
        return values

    def _key(self, key: Any) -> Any:
        return key if isinstance(key, str) else self.value(key)


def form_of(tensor: Tensor) -> list[int]:
    """Return the name of a tensor in a message: its type and shape.

    Raises:
        UsageError: it is sparse, or otherwise not laid out by strides.
    """
    if tensor.layout != torch.strided:
        raise not_sent(f"a tensor of layout {tensor.layout}")
    return [NUMBERS[tensor.dtype], *tensor.shape]


def not_sent(found: str) -> UsageError:
    """Return the error about a value that cannot be sent, because it is no plain data."""
    return UsageError(
        "this cannot be sent to another host",
        got=found[:200],
        expected=_PLAIN,
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

    def take(_: Path, tensor: Tensor) -> list[int]:
        stands_for = form_of(tensor)
        tensors.append(tensor.detach().cpu().contiguous())
        return stands_for

    try:
        text = msgspec.msgpack.encode(Encoder(take, records=found.add).form(value))
    except (NotPlain, msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise not_sent(str(error)) from error
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
    begin = end if end <= len(data) else len(data)  # first of the elements that no tensor has yet

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
        form = msgspec.msgpack.decode(data[_LENGTH_BYTES:end].tobytes())
        return Decoder(tensor, records).value(form)
    except Exception as error:  # any kind: the bytes may be anything
        raise ValueError(f"{type(error).__name__}: {error}"[:500]) from error


@cache
def _named_by(kind: type) -> frozenset[type]:
    """Return this dataclass, and the dataclasses that its fields may hold."""
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
