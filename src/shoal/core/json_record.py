"""Frozen dataclasses from JSON objects that people may have edited. Errors name a wrong field."""

from __future__ import annotations

from typing import Any, TypeVar

from shoal.core.errors import PlanError
from shoal.core.outer import Outer

T = TypeVar("T")
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
    "bool | None": (bool, type(None)),
    "Placement": (str, dict),
    "Outer | None": (Outer, type(None)),
    "dict[str, int]": (dict,),
    "dict[str, Any]": (dict,),
    "tuple[Choice, ...]": (tuple,),
}


def record_of(kind: type[T], row: Any, source: str) -> T:
    """Build a frozen dataclass from a JSON object. Refuse a field that does not fit, by name."""
    fields = kind.__dataclass_fields__  # type: ignore[attr-defined]
    if not isinstance(row, dict):
        raise PlanError(
            f"{source} is not an object", got=repr(row)[:80], expected=", ".join(fields)
        )
    unknown = sorted(set(row) - set(fields))
    if unknown:
        raise PlanError(
            f"{source} has unknown fields", got=", ".join(unknown), expected=", ".join(fields)
        )
    for name, value in row.items():
        if not isinstance(value, _TYPES[fields[name].type]) or (
            isinstance(value, bool) and "bool" not in fields[name].type
        ):
            raise PlanError(
                f"{source}: {name} is of the wrong type",
                got=repr(value)[:80],
                expected=fields[name].type,
            )
    try:
        return kind(**row)
    except TypeError as error:
        raise PlanError(
            f"{source} lacks a field", got=str(error), expected=", ".join(fields)
        ) from error
