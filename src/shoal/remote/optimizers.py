"""An optimizer's class as a name, which another host looks up: no code crosses."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.remote.wire import Data, MessagePart

_DO = (
    "define the optimizer's class in a module that every host has, or before shoal.init(), behind "
    "which a server's script ends"
)


class OptimizerForm(MessagePart, frozen=True):
    """An optimizer without parameters and state."""

    kind: str  # "module:Class"
    attributes: Data


def name_of(kind: type[Optimizer]) -> str:
    """The name of an optimizer's class.

    Raises:
        UsageError: others would not find it under that.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind_of(name) is not kind:
        raise UsageError("another class has the name of the optimizer's", got=name, do=_DO)
    return name


def kind_of(name: str) -> type[Optimizer]:
    """The class of that name.

    Raises:
        UsageError: it is not here, or no optimizer.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # any kind: a module that is imported runs
        got = f"{name} ({type(error).__name__}: {error})"
        raise UsageError("an optimizer's class is not found", got=got, do=_DO) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UsageError(
            "what is to update parameters is no optimizer",
            got=name,
            expected="a subclass of torch.optim.Optimizer",
            do=_DO,
        )
    return found
