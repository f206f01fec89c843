"""A part of a batch that is made already, or several such batches as one.

Rows are the first dimension of all tensors and arrays in it, and columns of words beside them.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.contracts.batch import tensors_of
from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal.profiling.identity import content


def num_rows(batch: Any) -> int:
    """Return a batch's number of rows: the first dimension of its first tensor with dimensions.

    Without tensors it is the length of the columns in a dict, or of a list of words or dicts.

    Raises:
        UsageError: it has none.

    >>> num_rows([torch.ones(3, 2)]), num_rows({"text": ["a", "b"]}), num_rows([{"text": "a"}])
    (3, 2, 1)
    """
    found = _first_dimension(batch)
    if found is None and not isinstance(batch, tuple):
        found = _length(batch)
    if found is None:
        raise UsageError(
            "a batch without tensors has no rows that could be cut",
            got=type(batch).__name__,
            do="let the loader give tensors whose first dimension is the rows, or as many batches "
            'as ranks can share out: shard(loader, batch="rank")',
        )
    return found


def part(batch: Any, start: int, stop: int) -> Any:
    """Return rows `start` to `stop` of a batch: of all tensors, arrays and lists in it."""
    rows = num_rows(batch)
    return batch if (start, stop) == (0, rows) else _cut(batch, rows, start, stop)


def one_of(batch: Any, number: int, parts: int) -> Any:
    """Return one of so many parts, which differ by one row at most.

    Raises:
        UsageError: there are fewer rows than parts.
    """
    rows = num_rows(batch)
    if rows < parts:
        raise UsageError(
            "a batch has fewer rows than ranks that share it",
            got=f"{rows} rows, {parts} ranks",
            do="make batches larger, or as many that the number of ranks divides them",
        )
    sizes = cut_sizes(rows, parts)
    start = sum(sizes[:number])
    return part(batch, start, start + sizes[number])


def joined(batches: Sequence[Any]) -> Any:
    """Return one batch with the rows of several, one behind the other.

    Raises:
        UsageError: they are not alike but for the number of rows.

    >>> joined([{"x": torch.ones(2), "name": ["a", "b"]}, {"x": torch.zeros(1), "name": ["c"]}])
    {'x': tensor([1., 1., 0.]), 'name': ['a', 'b', 'c']}
    """
    return _join(list(batches), [num_rows(batch) for batch in batches])


def digest_of(row: Any, most: int | None = None) -> int:
    """Return a digest of a row of a stream, of its tensors, arrays, words and numbers; never 0.

    Args:
        row: a row, or a batch.
        most: number of elements that it reads of each tensor, array or word; by default all.
    """
    found = 1
    for leaf in pytree.tree_leaves(row):
        if isinstance(leaf, Tensor):
            if most is not None:
                if leaf.device.type != "cpu" or leaf.layout is not torch.strided:
                    continue
                leaf = leaf.detach().reshape(-1)[:most]
            found = zlib.crc32(content(leaf), found)
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            looked_at = leaf if most is None else leaf.reshape(-1)[:most]
            found = zlib.crc32(np.ascontiguousarray(looked_at).tobytes(), found)
        elif isinstance(leaf, str | bytes):
            found = zlib.crc32(repr(leaf[:most]).encode(), found)
        elif isinstance(leaf, int | float):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found or 1


def _first_dimension(value: Any) -> int | None:
    if isinstance(value, Tensor | np.ndarray):
        return len(value) if value.ndim else None
    dimensions = map(_first_dimension, _inner(value))
    return next((rows for rows in dimensions if rows is not None), None)


def _length(batch: Any) -> int | None:
    """Return the rows of a batch without tensors; None if nobody can say."""
    if isinstance(batch, list):
        has_columns = any(isinstance(column, list | tuple) for column in batch)
        return None if has_columns or not batch else len(batch)
    lengths = {len(column) for column in _inner(batch) if isinstance(column, list)}
    return lengths.pop() if len(lengths) == 1 else None


def _inner(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _remade(value: Any, inner: list[Any]) -> Any:
    """Return a container like this one, with other values in their order; the same if it is none.

    A dict of a class of its own, as transformers' BatchEncoding, is copied with its attributes.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*inner)
    if isinstance(value, list | tuple):
        return type(value)(inner)
    made: Any
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for name, item in zip(list(value), inner, strict=True):
            made[name] = item
        return made
    if isinstance(value, Mapping):
        made = type(value)
        return made(dict(zip(value, inner, strict=True)))
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field, item in zip(fields(value), inner, strict=True):
            object.__setattr__(made, field.name, item)  # also if it is frozen
        return made
    return value


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in pytree.tree_leaves(value))


def _is_column(value: Any, rows: int) -> bool:
    """Return whether a value is a column of words or numbers."""
    return isinstance(value, list | tuple) and len(value) == rows and not _has_tensors(value)


def _cut(value: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim and len(value) != rows:
            raise UsageError(
                "a batch cannot be cut: its tensors have unlike numbers of rows",
                got=f"first dimensions {rows} and {len(value)}",
                do='shard(loader, batch="rank"), with as many batches that the number of ranks '
                "divides them",
            )
        return value[start:stop] if value.ndim else value
    if _is_column(value, rows):
        return value[start:stop]
    inner = _inner(value)
    if not inner and not isinstance(value, Mapping | list | tuple) and tensors_of(value):
        raise UsageError(
            "a batch cannot be cut: an object in it has tensors of its own",
            got=type(value).__name__,
            expected="tensors in dicts, lists, tuples and dataclasses",
            do="let the loader give one of those, or as many batches that the number of ranks "
            "divides them",
        )
    return _remade(value, [_cut(part, rows, start, stop) for part in inner])


def _join(values: list[Any], rows: list[int]) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _unlike(*(type(value).__name__ for value in values))
    if isinstance(first, Tensor | np.ndarray) and first.ndim:
        kinds = [f"{value.dtype} (…, {value.shape[1:]})" for value in values]
        if len(set(kinds)) > 1 or any(map(_is_uneven, values, rows)):
            raise _unlike(*(f"{value.dtype} {tuple(value.shape)}" for value in values))
        return torch.cat(values) if isinstance(first, Tensor) else np.concatenate(values)
    if all(map(_is_column, values, rows)):
        return type(first)(item for value in values for item in value)
    parts = list(map(_inner, values))
    if parts[0]:
        pairs = zip(values, parts, strict=True)
        names = [list(value) if isinstance(value, Mapping) else len(part) for value, part in pairs]
        if any(name != names[0] for name in names):
            raise _unlike(*map(str, names))
        return _remade(first, [_join(list(each), rows) for each in zip(*parts, strict=True)])
    digests = {digest_of(value) for value in values}
    if any(value is not first for value in values) and (len(digests) > 1 or 1 in digests):
        raise _unlike(*map(repr, values))
    return first  # all alike, as None or a number of classes


def _is_uneven(value: Any, rows: int) -> bool:
    return len(value) != rows


def _unlike(*found: str) -> UsageError:
    """Return the error about batches that cannot be one."""
    return UsageError(
        "the last batch has fewer rows than the ranks that share it, and cannot be joined with the "
        "ones before",
        got=" and ".join(dict.fromkeys(found))[:200],
        expected="batches that are alike, but for the number of rows",
        do="leave the last batch out, or pad all batches alike",
    )
