"""Copies and pickles of modules that Shoal has changed: ordinary modules, which need no shoal.

    served_class     the class of a layer that a strategy serves
    plain            reduces a layer with a changed class, for copies and pickles
    StaysBehind      a hook or an attribute of a module that no copy has
    leaves_behind    makes copies of all modules of a class leave these out

A hook that is left out goes with its number. Otherwise its settings would hold for a later hook
with the same number. Guarded by tests/session/test_copies.py.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

from torch import nn

# tables of a module's hooks, each with the tables of settings that use the same numbers
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


_CLASSES: dict[tuple[Any, Any], Any] = {}


def plain(module: nn.Module, kind: type[nn.Module], slot: str) -> tuple[Any, ...]:
    """Reduce a served layer for copy or pickle as torch does, without the attribute `slot`."""
    state = {name: value for name, value in vars(module).items() if name != slot}
    return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]


def class_served_by(serving: Any, kind: Any, name: str, module: str | None = None) -> Any:
    """Return the class of served layers of a kind. It is made once and used for all of them.

    Args:
        serving: the class that runs them.
        kind: the layers' own class.
        name: the name of the new class.
        module: the module of the new class, if plans know it by that; by default this one.
    """
    key = serving, kind
    if key not in _CLASSES:
        own = {} if module is None else {"__module__": module}
        _CLASSES[key] = type(name, (serving, kind), own)
    return _CLASSES[key]


def kind_before(layer: Any) -> type[nn.Module]:
    """Return the class that a layer had before it was served."""
    kind: type[nn.Module] = type(layer).__bases__[-1]
    return kind


class StaysBehind:
    """A hook or an attribute of a module that copies and pickles of the module leave out."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # a class with its own way to copy modules gets a function that does nothing
        return getattr, (nullcontext(), "__exit__")


def leaves_behind(kind: type[nn.Module]) -> None:
    """Make copies and pickles of all modules of a class leave out their `StaysBehind` parts."""
    earlier = copyreg.dispatch_table.get(kind)
    if not isinstance(earlier, _Reduced):
        copyreg.pickle(kind, _Reduced(earlier))


@final
@dataclass(frozen=True)
class _Reduced:
    """Reduces modules of a class as before, without the parts that stay behind."""

    earlier: Callable[[Any], Any] | None

    def __call__(self, module: nn.Module) -> Any:
        reduced = module.__reduce_ex__(2) if self.earlier is None else self.earlier(module)
        if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        return (*reduced[:2], _without(reduced[2]), *reduced[3:])


def _without(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without parts that stay behind, in tables of hooks too."""
    kept = {name: value for name, value in state.items() if not isinstance(value, StaysBehind)}
    for table, marks in _HOOKS.items():
        hooks = kept.get(table, {})
        left = OrderedDict(
            (number, hook) for number, hook in hooks.items() if not isinstance(hook, StaysBehind)
        )
        if len(left) < len(hooks):
            kept[table] = left
            for mark in marks:
                marked = kept.get(mark, {})
                kept[mark] = OrderedDict((n, marked[n]) for n in marked if n in left)
    return kept
