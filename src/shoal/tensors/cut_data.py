"""`.data` of a parameter of which this rank holds a part, and views of it.

    a read            the whole at that moment, from wherever the rest is
    `clamp_`, `mul_`  change each rank's part
    other changes     every rank changes the whole alike, and keeps its part of it
    a view, an item   the same for a part of the whole

So it is an alias of the parameter's memory, as `.data` is. It takes no memory itself (`meta`). A
read is a collective. Guarded by tests/equivalence/test_cut.py and tests/served/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.tensors.in_place_functions import ELEMENTWISE, is_change


class Parted(Protocol):
    """The division of a parameter of which this rank holds a part."""

    like: Tensor

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole's shape, as a view."""

    def whole(self, part: Tensor) -> Tensor:
        """Return the whole, given this rank's part (a collective)."""

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Apply an element-wise function in place to the part."""


class _View(NamedTuple):
    """A function that gives a view, with its arguments after the first."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def of(self, tensor: Tensor) -> Any:
        return self.function(tensor, *self.args, **self.kwargs)


@final
class CutData(Tensor):
    """An alias of a cut parameter's memory, or of a view of it."""

    parted: Parted
    local: Tensor  # this rank's part
    _views: tuple[_View, ...]  # functions that make this view of the whole

    @classmethod
    def of(cls, parted: Parted, local: Tensor) -> CutData:
        """Return the alias of the whole parameter."""
        return cls._view(parted, local, (), parted.like)

    @classmethod
    def _view(
        cls, parted: Parted, local: Tensor, views: tuple[_View, ...], like: Tensor
    ) -> CutData:
        alias = like.as_subclass(cls)
        alias.parted, alias.local, alias._views = parted, local, views
        return alias

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, CutData):
            if func in OF_THE_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in OF_THE_PART:
                return func(first.local, *args[1:], **kwargs)
            if func in (Tensor.detach, DATA):
                return first
            if is_change(func):
                first._change(func, args[1:], kwargs)
                return first
            if moves_nothing(func, first.local, args[1:], kwargs):
                return first
            view = first.view_by(func, args[1:], kwargs)
            if view is not None:
                return view
        return func(*pytree.tree_map(_value, tuple(args)), **pytree.tree_map(_value, kwargs))

    def is_all_of(self, parted: Parted) -> bool:
        """Return whether it is an alias of the whole parameter with this division."""
        return self.parted is parted and not self._views

    def value(self) -> Tensor:
        """Return the values in the memory (a collective)."""
        return self._of(self.parted.whole(self.local))

    def _of(self, whole: Tensor) -> Tensor:
        for view in self._views:
            whole = view.of(whole)
        return whole

    @torch.no_grad()
    def _change(self, func: Any, args: Any, kwargs: Any) -> None:
        """Change the memory: every rank changes its part, or all change the whole alike."""
        if not self._views and func.__name__ in ELEMENTWISE:
            self.parted.change(func, self.local, args, kwargs)
            return
        args, kwargs = pytree.tree_map(_value, (tuple(args), dict(kwargs)))
        whole = self.parted.whole(self.local)
        func(self._of(whole), *args, **kwargs)
        self.local.copy_(self.parted.part(whole))

    def view_by(self, func: Any, args: Any, kwargs: Any) -> CutData | None:
        """Return the view that a function gives; None if its result is no view."""
        view = _View(func, args, kwargs)
        if not (func in _GETTERS or getattr(func, "__name__", "") in _VIEWS) or any(
            isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((view.args, view.kwargs))
        ):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            memory = self.untyped_storage()
            form = view.of(self.as_subclass(Tensor))
            if not isinstance(form, Tensor) or form.untyped_storage()._cdata != memory._cdata:
                return None
        return CutData._view(self.parted, self.local, (*self._views, view), form)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = value = self.value()
        return value


def moves_nothing(func: Any, part: Tensor, args: Any, kwargs: Any) -> bool:
    """Return whether a function that may move or cast a tensor leaves a part as it is."""
    if getattr(func, "__name__", "") not in _MOVES:
        return False
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return func(part, *args, **kwargs) is part


def _value(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, CutData) else leaf


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


DATA = _getter("data")
_MOVES = frozenset(
    ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "contiguous")
)
_VIEWS = frozenset(
    (
        *("__getitem__", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("transpose", "permute", "narrow", "select", "movedim", "t", "view_as", "diagonal"),
        *("expand", "ravel", "swapaxes", "swapdims", "as_strided", "unfold"),
    )
)
_GETTERS = frozenset(map(_getter, ("T", "mT", "H", "mH", "real")))
# Functions with the same answer for the part and the whole.
OF_THE_PART = frozenset(
    {
        *map(
            _getter,
            (
                "dtype",
                "device",
                "requires_grad",
                "is_leaf",
                "layout",
                "is_cuda",
                "_version",
                "grad_fn",
            ),
        ),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad",)),
        *map(_getter, ("_backward_hooks", "_post_accumulate_grad_hooks", "itemsize")),
        Tensor.requires_grad_,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
    }
)
# Functions that depend on the whole's shape.
OF_THE_SHAPE = frozenset(
    {
        *map(_getter, ("shape", "ndim", "nbytes")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.__len__,
    }
)
