"""Plain data as JSON, with tensors in a file: the form of each object in state.json.

    None, booleans, whole numbers, text, finite numbers    unchanged
    lists, and dicts with text as keys                     unchanged
    other known values                                     {"$": its kind, …}
    a tensor                                               {"$": "tensor", "name": in its file}

There is no pickle: a reader of a checkpoint runs no code of its writer. Unknown values are refused,
with the way to them. Guarded by tests/checkpoint/test_tree.py.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.parts import Spread
from shoal.contracts.plain import DTYPES
from shoal.core.errors import UsageError

KIND = "$"
MOST_KEYS = 200  # the reader calls itself once for each key on the way to a value
_MOST_BITS = 8192  # longest whole number; Python reads no text of 4,300 digits or more
Path = tuple[str, ...]
Take = Callable[[Path, Any], str]  # keeps a tensor at a place, and returns its name
Give = Callable[[str], Tensor]  # returns the tensor of a name

_DTYPES = {str(dtype): dtype for dtype in DTYPES}
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
    "defaultdict": dict,  # code makes its missing values, and no code is saved
}


def encoded(value: Any, take: Take, path: Path = ()) -> Any:
    """Encode a value as JSON can hold it.

    Args:
        value: plain data and tensors.
        take: keeps each tensor with its place, and returns its name.
        path: the keys that lead to the value.

    Raises:
        UsageError: something in it is not plain data.
    """
    if len(path) > MOST_KEYS:
        raise unsaved(path[:4])
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
    if isinstance(value, Tensor | Spread):
        return {KIND: "tensor", "name": take(path, value)}  # save 8
    if isinstance(value, Mapping):
        return _encoded_dict(value, take, path)
    name = type(value).__name__
    if type(value) is list or isinstance(value, tuple) or type(value) in _LISTS.values():
        items = [encoded(item, take, (*path, str(i))) for i, item in enumerate(value)]
        if type(value) is list:
            return items
        return {KIND: name if name in _LISTS else "tuple", "items": items}
    return _encoded_other(value, take, path)


def _checked_int(value: int, path: Path) -> int:
    if value.bit_length() > _MOST_BITS:
        got = f"a whole number of {value.bit_length()} bits"
        raise unsaved(path, got, f"at most {_MOST_BITS} bits")
    return value


def _encoded_dict(value: Mapping[Any, Any], take: Take, path: Path) -> Any:
    kind = type(value).__name__ if type(value).__name__ in _DICTS else "dict"
    parts = [(key, encoded(part, take, (*path, str(key)))) for key, part in value.items()]
    are_text = all(isinstance(key, str) for key, _ in parts) and KIND not in value
    versions = _versions(value)
    if are_text and kind == "dict":
        return dict(parts)
    form: dict[str, Any] = {KIND: kind}
    if versions:
        form["versions"] = versions
    if are_text:
        return {**form, "values": dict(parts)}
    pairs = [[encoded(key, take, path), part] for key, part in parts]
    return {**form, "pairs": pairs}


def _encoded_other(value: Any, take: Take, path: Path) -> Any:
    if isinstance(value, bytes):
        return {KIND: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {KIND: "complex", "value": repr(value)}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value)}
    if isinstance(value, torch.device):
        return {KIND: "device", "value": str(value)}
    if isinstance(value, np.generic):
        return encoded(value.item(), take, path)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {KIND: "array", "name": take(path, torch.tensor(value, device="cpu"))}
    raise unsaved(
        path,
        f"a {type(value).__module__}.{type(value).__qualname__}",
        "an object with state_dict and load_state_dict, or plain data: tensors, numbers, "
        "strings, bytes, booleans, None, and lists, tuples and dicts of these",
    )


def unsaved(path: Path, got: str = "", expected: str = "") -> UsageError:
    """Return the error about a value that no checkpoint can have.

    Args:
        path: the keys that lead to it.
        got: the value in words; by default one that lies too deep.
        expected: the values that can be saved.
    """
    got = got or f"more than {MOST_KEYS} values within one another, or one within itself"
    return UsageError(
        f"{'.'.join(path)} cannot be saved",
        got=got,
        expected=expected,
        do="leave it out, or give what it is made of",
    )


def _versions(value: Any) -> dict[str, int]:
    """Return the versions of a state_dict's modules, without the ones that are 1."""
    found = {name: facts.get("version") for name, facts in _metadata(value).items()}
    return {name: version for name, version in found.items() if version not in (None, 1)}


def _metadata(value: Any) -> Mapping[str, Mapping[str, Any]]:
    metadata = getattr(value, "_metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}


def decoded(form: Any, give: Give) -> Any:
    """Decode a value from its form.

    Args:
        form: the JSON form.
        give: returns the tensor of a name.

    Raises:
        ValueError: the form is none of a value.
    """
    try:
        return _decoded(form, give)
    except UsageError:  # `give` found a corrupted file
        raise
    except Exception as error:  # any error: the form may be anything
        raise ValueError(f"{type(error).__name__}: {error}"[:400]) from error


def _decoded(form: Any, give: Give) -> Any:
    if isinstance(form, list):
        return [_decoded(item, give) for item in form]
    if not isinstance(form, dict):
        return form
    if KIND not in form:
        return {key: _decoded(part, give) for key, part in form.items()}
    kind = form[KIND]
    if kind == "tensor":
        return give(form["name"])
    if kind == "array":
        return give(form["name"]).numpy()
    if kind in _LISTS:
        return _LISTS[kind](_decoded(item, give) for item in form["items"])
    if kind in _DICTS:
        return _decoded_dict(form, give)
    makers: dict[str, Callable[[str], Any]] = {
        "float": float,
        "complex": complex,
        "bytes": base64.b64decode,
        "dtype": _DTYPES.__getitem__,
        "device": torch.device,
    }
    if kind not in makers:
        raise ValueError(f"no kind of value has the name {kind!r}")
    return makers[kind](form["value"])


def _decoded_dict(form: Mapping[str, Any], give: Give) -> Any:
    pairs = form["pairs"] if "pairs" in form else form["values"].items()
    values = _DICTS[form[KIND]]({_key(key, give): _decoded(part, give) for key, part in pairs})
    if "versions" in form:
        values._metadata = OrderedDict(
            (name, {"version": version}) for name, version in form["versions"].items()
        )
    return values


def _key(key: Any, give: Give) -> Any:
    return key if isinstance(key, str) else _decoded(key, give)
