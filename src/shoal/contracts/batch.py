"""Batches and their tensors: in containers, in dataclasses and in other objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import RanksDiffer

# types that inputs and outputs may refer to, but are not made of
OPAQUE = (nn.Module, type, ModuleType)
DEPTH = 3  # levels of objects within objects


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in containers.

    If there are none, return the ones in attributes of objects.
    """
    found: set[int] = set()
    level = [batch]
    for _ in range(1 + DEPTH):
        leaves = [leaf for value in level for leaf in pytree.tree_leaves(value)]
        if tensors := [leaf for leaf in leaves if isinstance(leaf, Tensor)]:
            return tensors
        objects = {id(leaf): leaf for leaf in leaves if _is_made_of(leaf)}
        level = [_attributes(leaf) for number, leaf in objects.items() if number not in found]
        found |= objects.keys()
    return []


def mapped(
    batch: Any,
    change: Callable[[Any], Any],
    kinds: type | tuple[type, ...] = Tensor,
    depth: int = DEPTH,
) -> Any:
    """Return the batch with all objects of some kinds changed, by default tensors.

    A part without such objects stays the same object. Other parts are copied.
    """
    leaves, form = pytree.tree_flatten(batch, is_leaf=lambda value: isinstance(value, kinds))
    changed = [
        change(leaf) if isinstance(leaf, kinds) else _inside(leaf, change, kinds, depth)
        for leaf in leaves
    ]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return batch
    return pytree.tree_unflatten(changed, form)


def _inside(
    holder: Any, change: Callable[[Any], Any], kinds: type | tuple[type, ...], depth: int
) -> Any:
    """Return the object, or a copy in which its items or attributes are changed."""
    if not depth or not _is_made_of(holder):
        return holder
    items = dict(holder) if isinstance(holder, MutableMapping) else _attributes(holder)
    changed = {name: mapped(value, change, kinds, depth - 1) for name, value in items.items()}
    if all(changed[name] is value for name, value in items.items()):
        return holder
    made = copy.copy(holder)
    for name, value in changed.items():
        if isinstance(made, MutableMapping):
            made[name] = value
        else:
            object.__setattr__(made, name, value)
    return made


def _is_made_of(value: Any) -> bool:
    """Return whether an object may hold tensors of a batch."""
    has_any = hasattr(value, "__dict__") or hasattr(value, "__dataclass_fields__")
    return has_any and not isinstance(value, OPAQUE) and not isinstance(value, Tensor)


def _attributes(value: Any) -> dict[str, Any]:
    names = {**getattr(value, "__dict__", {}), **getattr(value, "__dataclass_fields__", {})}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def same_batch(ranks: int) -> RanksDiffer:
    """Make the error for ranks that were all fed the same rows."""
    return RanksDiffer(
        f"all {ranks} ranks were fed the same batch, so every rank would compute the same "
        "gradients",
        where="the first forward",
        do="wrap the loader on every rank: loader = shoal.shard(loader), or, where inputs are the "
        "same on purpose, give parallelize samples whose targets differ",
    )
