"""A part of a batch that is already made: some of the rows of everything in it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal.profiling.identity import content


def num_rows(batch: Any) -> int:
    """Return a batch's number of rows: the first dimension of its first tensor with dimensions.

    Raises:
        UsageError: the batch has no such tensor.
    """
    found = _first_dimension(batch)
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


def _inner(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return []


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in pytree.tree_leaves(value))


def _cut(value: Any, rows: int, start: int, stop: int) -> Any:
    def cut(inner: Any) -> Any:
        return _cut(inner, rows, start, stop)

    if isinstance(value, Tensor | np.ndarray):
        if value.ndim and len(value) != rows:
            raise UsageError(
                "a batch cannot be cut: its tensors have unlike numbers of rows",
                got=f"first dimensions {rows} and {len(value)}",
                do='shard(loader, batch="rank"), with as many batches that the number of ranks '
                "divides them",
            )
        return value[start:stop] if value.ndim else value
    if isinstance(value, list | tuple) and len(value) == rows and not _has_tensors(value):
        return value[start:stop]  # a column of words or numbers
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(cut, value))
    if isinstance(value, list | tuple):
        return type(value)(map(cut, value))
    if isinstance(value, Mapping):
        kind: Any = type(value)
        return kind({name: cut(inner) for name, inner in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{e.name: cut(getattr(value, e.name)) for e in fields(value)})
    return value
