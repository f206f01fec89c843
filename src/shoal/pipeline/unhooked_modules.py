"""Modules without their hooks, for runs that compute forms alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Run a module without its forward hooks, which are for values."""
    hooks, module.__dict__["_forward_hooks"] = module._forward_hooks, OrderedDict()
    try:
        yield
    finally:
        module.__dict__["_forward_hooks"] = hooks


@contextmanager
def without_backward_hooks(module: nn.Module) -> Iterator[None]:
    """Hide hooks that only make sense where there are gradients."""
    kept = {name: vars(module)[name] for name in _BACKWARD_HOOKS}
    vars(module).update({name: OrderedDict[int, Any]() for name in _BACKWARD_HOOKS})
    try:
        yield
    finally:
        vars(module).update(kept)
