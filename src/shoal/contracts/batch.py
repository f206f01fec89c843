"""What a batch is made of: tensors in containers, in dataclasses and in other objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import RanksDiffer

OPAQUE = (nn.Module, type, ModuleType)  # what inputs and outputs may refer to, but are not made of
DEPTH = 3  # objects within objects


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in containers; where there are none, those in the attributes of objects."""
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
    """The same batch with all of some kinds in it changed, tensors by default.

    What has none stays the same object. Of other objects there is a copy.
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
    """An object with the items and attributes changed that it has."""
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
    """Whether an object may hold tensors that a batch is made of."""
    has_any = hasattr(value, "__dict__") or hasattr(value, "__dataclass_fields__")
    return has_any and not isinstance(value, OPAQUE) and not isinstance(value, Tensor)


def _attributes(value: Any) -> dict[str, Any]:
    names = {**getattr(value, "__dict__", {}), **getattr(value, "__dataclass_fields__", {})}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def same_batch(ranks: int) -> RanksDiffer:
    """The error of ranks that all have been fed the same rows."""
    return RanksDiffer(
        f"all {ranks} ranks were fed the same batch, so every rank would compute the same "
        "gradients",
        where="the first forward",
        do="wrap the loader on every rank: loader = shoal.shard(loader), or, where inputs are the "
        "same on purpose, give parallelize samples whose targets differ",
    )
