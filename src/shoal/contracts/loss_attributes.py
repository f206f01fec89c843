"""Attributes of modules that may hold values of a forward, such as a term of the loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_OF_MODULES = frozenset(vars(nn.Module()))


def kept_values_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that may hold values which it has computed."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor | list | tuple | dict) and name not in _OF_MODULES
    }


def keep(module: nn.Module, name: str, value: Any) -> None:
    """Replace the value of an attribute.

    A list or dict is changed in place, since others may hold it.
    """
    before = vars(module)[name]
    if value is before:
        return
    if isinstance(before, list):
        before[:] = value
    elif isinstance(before, dict):
        before.update(value)
    else:
        vars(module)[name] = value
