"""Functions of outputs that are cut: lists of functions that leave them cut, and arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_After = Callable[[Tensor], Tensor]


class Use(NamedTuple):
    """A use of an output: by a loss, a softmax, or a layer. An empty one gathers the output."""

    loss_rows: int = 0
    softmax_rows: int = 0
    layer: str = ""


class BestOf(NamedTuple):
    """Arguments of argmax or topk."""

    dim: int | None
    keepdim: bool
    k: int

    @classmethod
    def asked(cls, name: str, args: Any, kwargs: Any) -> BestOf | None:
        """Return the arguments of a call for the best classes, in order; None for another call."""
        names = ("dim", "keepdim") if name == "argmax" else ("k", "dim", "largest", "sorted")
        given = dict(zip(names, args, strict=False)) | kwargs
        best = cls(
            given.pop("dim", None if name == "argmax" else -1),
            given.pop("keepdim", False),
            given.pop("k", 1),
        )
        is_ordered = given.pop("sorted", True) is True and given.pop("largest", True) is True
        return best if is_ordered and not given else None


class RowViews(NamedTuple):
    """Row numbers after a function that gives views of an output."""

    numbers: Sequence[Tensor]
    share_memory: bool  # True if they are views of the output, not copies
    are_several: bool

    @classmethod
    def of(
        cls, numbers: Tensor, classes: int, func: Any, args: Any, kwargs: Any
    ) -> RowViews | None:
        """Apply the function to row numbers; return None unless classes stay the last dimension."""
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        # takes no memory
        wide = numbers.contiguous().unsqueeze(-1).expand(*numbers.shape, classes)
        viewed = func(wide, *args, **kwargs)
        views = viewed if isinstance(viewed, tuple) else (viewed,)
        if any(
            not v.dim() or v.shape[-1] != classes or (classes > 1 and v.stride(-1)) for v in views
        ):
            return None
        memory = wide.untyped_storage().data_ptr()
        share = bool(views) and views[0].untyped_storage().data_ptr() == memory
        return cls([v[..., 0] for v in views], share, isinstance(viewed, tuple))


def view_of(func: Any, args: Any, kwargs: Any, number: int) -> _After:
    """Return a function for one of the views that a function gives."""

    def view(whole: Tensor) -> Tensor:
        viewed = func(whole, *args, **kwargs)
        one: Tensor = viewed[number] if isinstance(viewed, tuple) else viewed
        return one

    return view


def is_view(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a function gives a view, which may be changed in place."""
    leaves = pytree.tree_leaves((args, kwargs))
    return getattr(func, "__name__", "") in VIEWS and not any(
        isinstance(leaf, Tensor) for leaf in leaves
    )


def shares_memory(made: Any, whole: Tensor) -> bool:
    """Return whether a function's first result is the whole, or a view of it."""
    made = made[0] if isinstance(made, tuple | list) and made else made
    return made is whole or (
        isinstance(made, Tensor)
        and made._base is not None
        and made._base is (whole if whole._base is None else whole._base)
    )


def has_a_part(leaf: Any) -> bool:
    """Return whether each rank would use a part of an argument, or get a part of its gradient."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or leaf.requires_grad)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


DETACH = (Tensor.detach, torch.detach, _getter("data"))
# functions that read values and have no gradient
SEES = frozenset(
    (
        *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
        *("__repr__", "__str__", "__format__"),
    )
)
OF_THE_SHAPE = frozenset(
    {
        *map(_getter, ("shape", "ndim", "dtype")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.__len__,
        Tensor.is_floating_point,
    }
)
OF_THE_PART = frozenset(
    map(_getter, ("device", "requires_grad", "is_cuda", "layout", "is_leaf", "grad_fn"))
)
ELEMENTWISE = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "clone", "mul", "div"),
        *("true_divide", "add", "sub", "neg", "tanh", "clamp", "negative", "subtract", "multiply"),
        *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__neg__"),
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid"),
        *("softplus", "square", "hardtanh", "hardsigmoid", "hardswish", "softsign", "logsigmoid"),
    )
)
IN_ORDER = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
VIEWS = IN_ORDER | frozenset(
    (
        *("__getitem__", "transpose", "permute", "narrow", "select", "chunk", "split", "unbind"),
        "movedim",
    )
)
