"""Convert Arrow tables to batches: a column of numbers is a tensor, any other column a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy
import pyarrow as pa
import torch

from shoal.core.errors import UsageError


def columns_of(table: pa.Table) -> dict[str, Any]:
    """Convert a table to a batch: a dict of its columns.

    Args:
        table: the rows of one batch.

    Returns:
        Numbers are a tensor of shape (rows,). Arrays of one length are a tensor of shape (rows,
        length), and so on for arrays of arrays. Arrays of unlike lengths are a list of tensors.
        Every other column is a list of Python values: `bytes`, `str`.

    Raises:
        UsageError: a column of numbers has a null, or an array in it has one.

    Examples:
        >>> table = pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], "name": ["a", "b"]})
        >>> columns_of(table)["x"].shape, columns_of(table)["name"]
        (torch.Size([2, 2]), ['a', 'b'])
    """
    return {name: _column(table[name].combine_chunks(), name) for name in table.column_names}


def _column(column: Any, name: str) -> Any:
    if isinstance(column, pa.ChunkedArray):  # it has no chunk, or is too long for one
        column = pa.concat_arrays(column.chunks) if column.chunks else pa.array([], column.type)
    kind = column.type
    while _is_list(kind):
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return column.to_pylist()
    return _numbers(column, name)


def _is_list(kind: Any) -> bool:
    types = pa.types
    return any(is_it(kind) for is_it in (types.is_list, types.is_large_list, _is_fixed))


def _is_fixed(kind: Any) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _numbers(column: Any, name: str, depth: int = 0) -> Any:
    """Make a tensor, or a list of them.

    Args:
        column: numbers, or arrays of them.
        name: the name of the whole column, for errors.
        depth: the number of arrays that these values stand in.
    """
    if column.null_count:
        row = next(i for i, value in enumerate(column) if not value.is_valid)
        raise UsageError(
            f"{'an array in ' * bool(depth)}the column {name!r} has a null, which is no number",
            got=f"{column.null_count} nulls among {len(column)} values, the first at "
            f"{'value' if depth else 'row'} {row}",
            do=_without_nulls(name, depth),
        )
    if not _is_list(column.type):
        return torch.from_numpy(numpy.array(column.to_numpy(zero_copy_only=False)))
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    inner = _numbers(column.flatten(), name, depth + 1)
    if isinstance(inner, list) or len(set(lengths.tolist())) > 1:
        return _pieces(inner, lengths.tolist())
    return inner.reshape(len(column), int(lengths[0]) if len(lengths) else 0, *inner.shape[1:])


def _without_nulls(name: str, depth: int) -> str:
    """Return the expression of Spark's that drops rows with a null."""
    if not depth:
        return f"drop such rows, or fill them: df.dropna(subset=[{name!r}])"
    found = "F.isnull"
    for number in range(depth):
        found = f"lambda v{number}: F.exists(v{number}, {found})" if number else found
    return (
        f'drop such rows: df.filter(~F.exists("{name}", {found})), with pyspark.sql.functions as F'
    )


def _pieces(values: Any, lengths: Iterable[int]) -> list[Any]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(values[start : start + length])
        start += length
    return pieces
