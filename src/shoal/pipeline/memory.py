"""Memory of tensors, and functions that change it in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.pipeline.absent_tensors import Absent
from shoal.pipeline.trees import tensors_in


def changes_in_place(function: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument in place."""
    name = getattr(function, "__name__", "")
    return (
        is_item(function)
        or (name.endswith("_") and not name.endswith("__"))
        or (
            name.startswith("__i")
            and name not in ("__invert__", "__int__", "__index__", "__iter__")
        )
    )


def written_by(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a function changes in place."""
    if kwargs.get("out") is not None:
        return tensors_in(kwargs["out"])
    return tensors_in(args[:1]) if changes_in_place(function) else []


def is_item(function: Callable[..., Any]) -> bool:
    """Return whether a function assigns to an item."""
    return getattr(function, "__name__", "") == "__setitem__"


def storage_of(tensor: Tensor) -> Any:
    """Return the memory of a tensor. Sparse tensors, and those inside of vmap, stand for it."""
    with torch._C.DisableTorchFunctionSubclass():
        form = tensor.slot.form if isinstance(tensor, Absent) else tensor
        try:
            return form.untyped_storage()
        except NotImplementedError:
            return form


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory."""
    storage = storage_of(tensor)
    key: int = storage._cdata if isinstance(storage, torch.UntypedStorage) else id(storage)
    return key
