"""Changes of a parameter of which this rank holds a part: in place, by `.data = …`, and by hooks.

    `clamp_`, `mul_` and similar      each rank changes its part
    others in place, items            every rank changes the whole alike, and keeps its part of it
    `.data = …` of the same form      the part of the new tensor becomes the parameter's memory
    a hook on the gradient            sees the whole mean gradient, and can change it

A move of the parameter to another device or type raises an error. Guarded by
tests/equivalence/test_cut.py and tests/served/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.tensors.cut_data import CutData
from shoal.tensors.in_place_functions import ELEMENTWISE, HOOKS, is_change

CUT = "_shoal_cut"  # attribute of a parameter: its `Cut`
_Wholes = Callable[[Any], Any]  # returns values with the whole for every cut parameter
_DATA: Any = vars(torch._C.TensorBase)["data"]


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the cut parameters that a function changes in place."""
    if is_change(func):
        first = args[:1] or kwargs
    elif "out" in kwargs:
        first = kwargs["out"]
    else:
        return []
    return [leaf for leaf in pytree.tree_leaves(first) if _is_cut(leaf)]


def change(func: Any, args: Any, kwargs: Any, written: Sequence[Tensor], wholes: _Wholes) -> Any:
    """Apply a function in place to all parts of these parameters."""
    subject, name = written[0], func.__name__
    if name in ELEMENTWISE and args and args[0] is subject:
        _cut_of(subject).change(func, subject, args[1:], kwargs)
        return subject
    if name == "register_hook" and _cut_of(subject).takes_hooks:
        return _hook(subject, args[1])
    is_far = any(not _cut_of(each).is_spread for each in written)
    if is_far or name in HOOKS or name in ("__set__", "__delete__"):
        raise refused(subject, name)
    if args and torch.is_grad_enabled() and subject.requires_grad:
        raise RuntimeError("a leaf Variable that requires grad is used in an in-place operation.")
    with torch.no_grad():
        changed = {id(each): _cut_of(each).whole(_part_of(each)) for each in written}
        args, kwargs = pytree.tree_map(
            lambda leaf: changed.get(id(leaf), leaf), (tuple(args), dict(kwargs))
        )
        func(*wholes(args), **wholes(kwargs))
        for parameter in written:
            _part_of(parameter).copy_(_cut_of(parameter).part(changed[id(parameter)]))
    return subject


def _hook(parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook that sees the whole gradient as it comes, and can change it."""
    its_cut = _cut_of(parameter)

    is_on_one_rank = max(its_cut.numels()) == its_cut.like.numel()

    def of_part(grad: Tensor) -> Any:
        if is_on_one_rank:
            return hook(grad) if grad.numel() else None
        whole = its_cut.whole(grad)
        before, changed = whole._version, hook(whole)
        if changed is None and whole._version == before:
            return None
        return its_cut.part(whole if changed is None else changed).contiguous()

    with torch._C.DisableTorchFunctionSubclass():
        return parameter.register_hook(of_part)


def replace_by(parameter: Tensor, value: Tensor, wholes: _Wholes) -> None:
    """Give a parameter other values, in memory of its own.

    Raises:
        UsageError: the values have another shape, type or device.
    """
    its_cut, part = _cut_of(parameter), _part_of(parameter)
    form = value.shape, value.dtype, value.device
    if not its_cut.is_spread or form != (its_cut.like.shape, part.dtype, part.device):
        raise refused(parameter, ".data = …")
    if value is parameter:
        return
    if isinstance(value, CutData) and value.is_all_of(its_cut):
        new = value.local
    else:
        with torch.no_grad():
            whole = value.value() if isinstance(value, CutData) else wholes(value)
            new = its_cut.part(whole).clone(memory_format=torch.contiguous_format)
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(parameter, new.detach())


def refused(parameter: Tensor, operation: str) -> UsageError:
    """Return the error for an operation that would reach only one part of a parameter."""
    its_cut = _cut_of(parameter)
    return UsageError(
        f"{operation} on parameter {its_cut.name}, of which this rank has a part, would not reach "
        "the rest",
        where=f"rank {its_cut.comm.rank} of {its_cut.comm.size}",
        do="move the model, change its type and hook into it before parallelize; or give "
        f"parallelize {pins([its_cut.name.rpartition('.')[0]])}; "
        "if an optimizer does it: use the one that was given to parallelize",
    )


def _is_cut(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and CUT in getattr(leaf, "__dict__", ())


def _cut_of(parameter: Tensor) -> Any:
    return parameter.__dict__[CUT]


def _part_of(parameter: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()
