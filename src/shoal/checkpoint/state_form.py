"""The form of state.json, checked before any value is used.

Anyone can compute a checksum, so a right one shows only that the disk is sound. Values of objects
are as checkpoint/tree.py decodes them. Guarded by tests/checkpoint/test_state_form.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from shoal.checkpoint.folder import is_plain
from shoal.checkpoint.run import MOST_STEPS
from shoal.core.numbers import is_count

Check = Callable[[Any, str], object]


def check_state(state: Any, names: Iterable[str]) -> None:
    """Raise ValueError unless this has the form of `State`.

    Args:
        state: the value that was read.
        names: the fields of `State`.
    """
    fields = _mapping(state, "state")
    if "objects" not in fields:
        raise ValueError("state has no objects")
    for name in names:
        if name in fields:
            _FIELDS.get(name, _mapping)(fields[name], name)


def as_count(value: Any, where: str, most: int = MOST_STEPS) -> int:
    """Return a whole number of at least 0, or raise ValueError."""
    if not is_count(value) or not 0 <= value <= most:
        raise _unlike(value, where, f"a whole number from 0 to {most}")
    return int(value)


def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object; raise ValueError if a key comes twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} comes twice")
        found[key] = value
    return found


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unlike(value, where, "an object")
    return value


def _unlike(value: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {type(value).__name__} {str(value)[:60]}, and not {expected}")


def _check_features(value: Any, where: str) -> None:
    if value is not None:
        _mapping(value, where)


def _check_list(value: Any, where: str) -> None:
    if not isinstance(value, list) or not value:
        raise _unlike(value, where, "a list with a state for each rank")


def _check_step(value: Any, where: str) -> None:
    if value is not None:
        as_count(value, where)


def _check_texts(value: Any, where: str) -> None:
    for name, text in _mapping(value, where).items():
        if not isinstance(text, str):
            raise _unlike(text, f"{where}.{name}", "a text")


def _check_objects(value: Any, where: str) -> None:
    for name in _mapping(value, where):
        if not is_plain(name):
            raise ValueError(f"an object has the name {name[:80]!r}, which no file can have")


def _check_files(value: Any, where: str) -> None:
    for name, checksums in _mapping(value, where).items():
        if not is_plain(name):
            raise ValueError(f"a file has the name {name[:80]!r}, which is not in this folder")
        _check_texts(checksums, f"{where}.{name}")
        if "" not in checksums:
            raise ValueError(f"{where}.{name} has no checksum of the header")


def _check_models(value: Any, where: str) -> None:
    for path, known in _mapping(value, where).items():
        way = f"{where}.{path}"
        facts = _mapping(known, way)
        _mapping(facts.get("plan", {}), f"{way}.plan")
        if facts.get("ranks") is not None:
            as_count(facts["ranks"], f"{way}.ranks")
        usual = facts.get("usual_rows")
        if usual is not None and not (_is_number(usual) and 0 <= usual < math.inf):
            raise _unlike(usual, f"{way}.usual_rows", "a number of rows")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FIELDS: dict[str, Check] = {
    "objects": _check_objects,
    "random": _check_list,
    "models": _check_models,
    "features": _check_features,
    "step": _check_step,
    "files": _check_files,
    "classes": _check_texts,
    "written_by": _check_texts,
}
