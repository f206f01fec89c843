"""Functions of a model's output as plain data, for a host that runs no script of its own.

A function of torch goes by its name, the loss as "". Tensors are left out: each rank sends its own
to the host. A function of another kind cannot be told: then ranks compute it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from shoal.pipeline.calls import Shape
from shoal.pipeline.expressions import (
    INTEGER,
    REAL,
    EndResult,
    Expression,
    SliceBounds,
    ThreadModes,
    Unclear,
)
from shoal.remote.station_messages import Shapes, ThreadSettings

LOSS_NAME = ""
_TENSOR, _RESULT, _SLICE, _INTEGER, _REAL, _TUPLE, _LIST, _DICT, _PLAIN = range(9)
Reference = tuple[
    int, int, int
]  # numbers of a call, of an expression (-1: the output), and of a result


@cache
def name_of(function: Callable[..., Any]) -> str | None:
    """Return the name of a function of torch; None if it has none."""
    name = resolve_name(function)
    if not isinstance(name, str) or not name.startswith("torch."):
        return None
    return name if _is_found(name, function) else None


def _is_found(name: str, function: Callable[..., Any]) -> bool:
    try:
        return bool(function_of(name) == function)
    except AttributeError:
        return False


def function_of(name: str) -> Callable[..., Any]:
    """Return a function of torch by its name.

    Raises:
        AttributeError: there is none.
    """
    if not name.startswith("torch."):
        raise AttributeError(name)
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def check_told(expression: Expression) -> None:
    """Raise Unclear if a host cannot be told a function."""
    function = expression.function
    if not expression.is_loss and (function is None or name_of(function) is None):
        raise Unclear
    as_data(expression.arguments, lambda result: (0, 0, 0))


def as_data(values: Any, reference: Callable[[EndResult], Reference]) -> Any:
    """Return arguments as plain data, without their tensors.

    Raises:
        Unclear: something among them is no plain data.
    """
    if isinstance(values, Tensor):
        return (_TENSOR,)
    if isinstance(values, EndResult):
        return (_RESULT, *reference(values))
    if values is INTEGER or values is REAL:
        return (_INTEGER,) if values is INTEGER else (_REAL,)
    if isinstance(values, SliceBounds):
        return (_SLICE, *(as_data(bound, reference) for bound in values.bounds))
    kind = type(values)
    if kind in (tuple, list):
        of_kind = _TUPLE if kind is tuple else _LIST
        return (of_kind, *(as_data(each, reference) for each in values))
    if kind is dict:
        return (_DICT, *(as_data(part, reference) for item in values.items() for part in item))
    if kind in (str, int, float, bool, type(None), torch.dtype):
        return (_PLAIN, values)
    raise Unclear


def from_data(data: Any, tensors: Any, result: Callable[[Reference], EndResult]) -> Any:
    """Return arguments that `as_data` has written, with tensors from an iterator."""
    kind, *parts = data
    if kind == _TENSOR:
        return next(tensors)
    if kind == _RESULT:
        return result((parts[0], parts[1], parts[2]))
    if kind in (_INTEGER, _REAL):
        return INTEGER if kind == _INTEGER else REAL
    if kind == _PLAIN:
        return parts[0]
    made = [from_data(part, tensors, result) for part in parts]
    if kind == _SLICE:
        return SliceBounds((made[0], made[1], made[2]))
    if kind == _DICT:
        return dict(zip(made[::2], made[1::2], strict=True))
    return tuple(made) if kind == _TUPLE else made


def settings_of(modes: ThreadModes) -> ThreadSettings:
    """Return settings of a thread as a part of a message."""
    return ThreadSettings(modes.grad, modes.autocast)


def modes_of(settings: ThreadSettings) -> ThreadModes:
    """Return settings of a thread from a part of a message."""
    return ThreadModes(settings.grad, tuple(settings.autocast))


def shapes_of(tensors: Iterable[Sequence[Shape]]) -> Shapes:
    """Return the shapes and types of each rank's tensors as a part of a message."""
    return tuple(tuple((tuple(shape), dtype) for shape, dtype in own) for own in tensors)
