"""Frozen dataclasses from JSON objects that people may have edited. Errors name a wrong field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from shoal.core.errors import PlanError
from shoal.core.numbers import shown
from shoal.core.outer_step import Outer

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
    check_types(kind, row, source)
    try:
        return kind(**row)
    except TypeError as error:
        raise PlanError(
            f"{source} lacks a field", got=str(error), expected=", ".join(fields)
        ) from error


def check_types(kind: type[Any], values: Mapping[str, Any], source: str) -> None:
    """Raise PlanError if a value is not of the type that its field of a dataclass has."""
    for name, value in values.items():
        declared = kind.__dataclass_fields__[name].type
        if not isinstance(value, _TYPES[declared]) or (
            isinstance(value, bool) and "bool" not in declared
        ):
            raise PlanError(
                f"{source}: {name} is of the wrong type", got=shown(value), expected=declared
            )
