"""Dataclasses in trees of values: torch looks into tuples and dicts, and into classes it knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import partial
from threading import Lock
from typing import Any

from torch.utils import _pytree as pytree

_LOCK = Lock()


def look_into_dataclasses(values: Any) -> None:
    """Let torch's trees look into the dataclasses among these values, from here on."""
    found = [leaf for leaf in pytree.tree_leaves(values) if is_dataclass(leaf)]
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
