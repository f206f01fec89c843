"""Modules that another object runs: a model in a pipeline, its layers, and its loss."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.core.eager_methods import eager
from shoal.strategies.copies import class_served_by, kind_before, plain

_SLOT = "_runner"  # attribute of a module: the object that runs it


def run_by(module: nn.Module, runner: Any) -> None:
    """Make calls of the module call `runner.called(forward, …)` instead."""
    kind = type(module)
    module.__class__ = class_served_by(_OtherRun, kind, f"Staged{kind.__name__}")
    module.__dict__[_SLOT] = runner


def run_no_more(module: nn.Module) -> None:
    """Undo `run_by`, if it was done."""
    if issubclass(type(module), _OtherRun):
        del module.__dict__[_SLOT]
        module.__class__ = kind_before(module)


def runs_by(module: nn.Module) -> Any:
    """Return the object that runs a module; None if the module runs as it is."""
    return module.__dict__.get(_SLOT)


class _OtherRun(nn.Module):
    """A module that another object runs. Its parameters, names and repr are the same.

    A copy of it is an ordinary module.
    """

    _runner: Any = None

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner is None:
            return super().forward(*args, **kwargs)
        return self._runner.called(super().forward, *args, **kwargs)

    def _get_name(self) -> str:
        return kind_before(self).__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return plain(self, kind_before(self), _SLOT)
