"""Rows of a batch: the sizes and tensors in it, the ways to them, and some rows of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.contracts.batch import DEPTH, OPAQUE, mapped

LENGTH = "#"  # the step of a path into a list
Path = tuple[int | str, ...]
Size = tuple[int, ...]


def picked(value: Any, number: int, rows: Sequence[int]) -> Any:
    """Return a value with these rows of everything in it that has `number` rows."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, list):
            if len(leaf) == number and not _holds_parts(leaf, number):
                return [leaf[row] for row in rows]
            return [picked(item, number, rows) for item in leaf]
        if leaf.dim() and len(leaf) == number:
            return leaf[torch.tensor(rows, device=leaf.device)]
        return leaf

    return mapped(value, pick, (list, Tensor))


def _holds_parts(values: list[Any], number: int) -> bool:
    """Return whether a list holds tensors of so many rows each, as torch's loader collates it."""
    return all(isinstance(value, Tensor) and value.shape[:1] == (number,) for value in values)


def picked_of_parts(batch: Any, number: int, rows: Sequence[int]) -> Any:
    """Return these rows of a whole batch. A list may hold the parts of a batch: [x, y]."""
    if isinstance(batch, list):
        return [picked(part, number, rows) for part in batch]
    return picked(batch, number, rows)


def sizes(value: Any, path: Path = (), depth: int = DEPTH) -> Iterator[tuple[Path, Size]]:
    """Yield the size of every tensor that has one, and the length of every list, in order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield path, tuple(value.shape)
    elif isinstance(value, list):
        if value and not isinstance(value[0], int | float | str):
            yield (*path, LENGTH), (len(value),)
            yield from sizes(value[0], (*path, 0), depth)
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from sizes(part, (*path, index), depth)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(key, str | int):
                yield from sizes(part, (*path, key), depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, OPAQUE):
        for name, part in vars(value).items():
            yield from sizes(part, (*path, f".{name}"), depth - 1)


def sizes_of_batch(batch: Any) -> Iterator[tuple[Path, Size]]:
    """Yield sizes in a batch. A list holds parts, as torch's loader collates it, or rows."""
    if isinstance(batch, list):
        if _may_be_rows(batch):
            yield (LENGTH,), (len(batch),)
        batch = tuple(batch)
    yield from sizes(batch)


def _may_be_rows(values: list[Any]) -> bool:
    """Return whether all items of a list are alike: words, dicts, pictures, more than a pair."""
    kinds = set(map(type, values))
    if len(kinds) != 1 or not isinstance(values[0], Tensor):
        return len(kinds) == 1
    return len(values) > 2 and len({value.shape for value in values}) == 1


def value_at(value: Any, path: Path) -> Any:
    """Return the value at the end of a path, or the length of a list; None if there is none."""
    for step in path:
        if step == LENGTH:
            return len(value) if isinstance(value, list) else None
        try:
            if isinstance(step, str) and step.startswith("."):
                value = getattr(value, step[1:])
            else:
                value = value[step]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return value


def size_at(value: Any, path: Path) -> Size | None:
    """Return the size of the tensor or list at the end of a path; None if there is none."""
    found = value_at(value, path)
    if path[-1:] == (LENGTH,):
        return None if found is None else (found,)
    return tuple(found.shape) if isinstance(found, Tensor) else None


def tensors_at(value: Any) -> list[tuple[Path, Tensor]]:
    """List the tensors of a batch that have a size, with the ways to them."""
    paths = [path for path, _ in sizes(tuple(value) if isinstance(value, list) else value)]
    found = ((path, value_at(value, path)) for path in paths if path[-1:] != (LENGTH,))
    return [(path, tensor) for path, tensor in found if isinstance(tensor, Tensor)]


def last_with(value: Any, number: int) -> Tensor | None:
    """Return the last tensor of a batch with so many rows, which is mostly the target."""
    same = [tensor for _, tensor in tensors_at(value) if len(tensor) == number]
    return same[-1] if same else None
