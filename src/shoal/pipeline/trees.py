"""Trees of values: arguments and results of functions and modules, by torch's rules for trees.

Most are tuples, lists and dicts of a few tensors and numbers, and a step looks at thousands of
them. So these are taken apart here, in less time. All other classes are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Lock
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_LOCK = Lock()
_PLAIN = frozenset({bool, int, float, str, type(None)})


def leaves_in(values: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    _gather(values, found)
    return found


def _gather(values: Any, found: list[Any]) -> None:
    kind = type(values)
    if kind is tuple or kind is list:
        for each in values:
            _gather(each, found)
    elif kind is dict:
        for each in values.values():
            _gather(each, found)
    elif kind in _PLAIN or isinstance(values, Tensor):
        found.append(values)
    else:
        found += pytree.tree_leaves(values)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a tree, in order."""
    return [leaf for leaf in leaves_in(values) if isinstance(leaf, Tensor)]


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Return a tree with `change(leaf)` in the place of each leaf."""
    kind = type(values)
    if kind is tuple:
        return tuple([mapped(change, each) for each in values])
    if kind is list:
        return [mapped(change, each) for each in values]
    if kind is dict:
        return {name: mapped(change, each) for name, each in values.items()}
    if kind in _PLAIN or isinstance(values, Tensor):
        return change(values)
    return pytree.tree_map(change, values)


def copied(values: Any) -> Any:
    """Return a tree with copies in the places of tensors."""
    return mapped(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, values)


def look_into_dataclasses(values: Any) -> None:
    """Let torch's trees look into the dataclasses among these values, from here on."""
    found = [leaf for leaf in leaves_in(values) if is_dataclass(leaf)]
    for leaf in found:
        if isinstance(leaf, type):
            continue
        kind = type(leaf)
        with _LOCK:
            if kind not in pytree.SUPPORTED_NODES:
                pytree.register_pytree_node(kind, _parts, partial(_rebuilt, kind))
        look_into_dataclasses(_parts(leaf)[0])


def _parts(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(field.name for field in fields(value) if hasattr(value, field.name))
    return [getattr(value, name) for name in names], names


def _rebuilt(kind: type, parts: Iterable[Any], names: tuple[str, ...]) -> Any:
    value: Any = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(value, name, part)  # also of a frozen one
    return value
