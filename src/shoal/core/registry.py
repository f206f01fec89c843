"""Finds what a folder offers: one class of the asked contract a file. Adding a scheme is adding a
file.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

from shoal.core.errors import PlanError


class _Named(Protocol):
    name: ClassVar[str]


T = TypeVar("T", bound=_Named)


def found(package: ModuleType, contract: type[T]) -> dict[str, type[T]]:
    """Every concrete class of `contract` defined in `package`, by its `name`, sorted by name."""
    return dict(_classes(package, contract))


@cache
def _classes(package: ModuleType, contract: Any) -> dict[str, Any]:
    classes: dict[str, Any] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, value in inspect.getmembers(module, inspect.isclass):
            if (
                issubclass(value, contract)
                and value.__module__ == module.__name__
                and not inspect.isabstract(value)
            ):
                kind: Any = value
                classes[kind.name] = kind
    return dict(sorted(classes.items()))


def named(package: ModuleType, contract: type[T], name: str) -> T:
    """One of them by name, with its default options (PlanError that lists the names and the nearest
    one).
    """
    classes = found(package, contract)
    if name not in classes:
        near = difflib.get_close_matches(name, classes, n=1)
        raise PlanError(
            f"there is no {contract.__name__.lower()} called {name!r}",
            expected="one of " + ", ".join(classes),
            do=f"did you mean {near[0]!r}?" if near else "use one of these names",
        )
    return classes[name]()
