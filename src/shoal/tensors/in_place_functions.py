"""Functions of torch that change the tensor that they are called on, or hook into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_SETTERS = frozenset({"__set__", "__delete__", "__setitem__", "__setstate__"})
_NO_CHANGES = frozenset({"__invert__", "__int__", "__index__", "__iter__"})


def is_change(function: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument in place, or hooks into it."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in _NO_CHANGES
    return in_place or augmented or name in _SETTERS or name in HOOKS


# Changes that treat each element by itself.
ELEMENTWISE = frozenset(
    (
        "add_",
        "sub_",
        "mul_",
        "div_",
        "copy_",
        "fill_",
        "zero_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "lerp_",
    )
)
