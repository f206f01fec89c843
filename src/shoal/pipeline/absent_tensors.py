"""Absent tensors: tensors that another rank computes, or that come later.

A rank runs the model's own forward, also where another rank has the layers. There functions are
given absent tensors, and return absent ones: only shape, type and device are computed.

    no value yet   functions on it compute forms. A look at values is `Undecided`
    with a value   functions take the value in its place

So a local variable of somebody's forward that was absent has a value once that has arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils.hooks import RemovableHandle

from shoal.core.errors import UsageError
from shoal.pipeline.trees import leaves_in, mapped
from shoal.pipeline.walk import is_walking
from shoal.tensors.cut import cut_of, is_cut

_UNDECIDED = (DataDependentOutputException, DynamicOutputShapeException)


class Undecided(Exception):
    """A forward looks at values that this rank does not have."""


@final
class Forms:
    """Computes forms of tensors: shape, type, device and strides, without values."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def form(self, tensor: Tensor) -> Tensor:
        """Return the form of a tensor."""
        if isinstance(tensor, Absent):
            return tensor.slot.form if tensor.slot.value is None else self.form(tensor.slot.value)
        if is_cut(tensor):
            like = cut_of(tensor).layout
            with self.mode:
                return torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=_device(tensor)
                )
        with torch._C.DisableTorchFunctionSubclass():
            return self.mode.from_tensor(tensor.detach())

    def absent(self, shape: Any, dtype: torch.dtype, device: torch.device, *, grad: bool) -> Absent:
        """Return an absent tensor of this form, with usual strides."""
        return Absent.of(self, torch.empty(shape, dtype=dtype, device="meta"), device, grad=grad)

    def like(self, tensor: Tensor) -> Absent:
        """Return an absent tensor of a tensor's form."""
        return Absent.of(self, self.form(tensor), grad=tensor.requires_grad)

    def likes(self, values: Any) -> Any:
        """Return values with absent tensors of their forms in the places of tensors."""
        return mapped(lambda leaf: self.like(leaf) if isinstance(leaf, Tensor) else leaf, values)

    def called(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return a function's results, with absent tensors in the places of tensors.

        A hook on an absent tensor is left out: it is registered where the value is computed.

        Raises:
            Undecided: the function looks at values.
        """
        if function is Tensor.register_hook:
            return RemovableHandle(OrderedDict())
        if function is Tensor.retain_grad:
            return None
        given: list[Tensor] = []
        forms: list[Tensor] = []
        grad = False

        def formed(leaf: Any) -> Any:
            nonlocal grad
            if not isinstance(leaf, Tensor):
                return leaf
            grad = grad or leaf.requires_grad
            given.append(leaf)
            forms.append(self.form(leaf))
            return forms[-1]

        formed_args, formed_kwargs = mapped(formed, (tuple(args), dict(kwargs)))
        try:
            with self.mode, torch.no_grad():
                returned = function(*formed_args, **formed_kwargs)
        except _UNDECIDED as error:
            raise Undecided(getattr(function, "__name__", str(function))) from error
        grad = grad and torch.is_grad_enabled() and function is not Tensor.detach

        def absent(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            for form, tensor in zip(forms, given, strict=True):
                if form is leaf:
                    return tensor
            return Absent.of(self, leaf, grad=grad and leaf.is_floating_point())

        return mapped(absent, returned)

    def needs_values(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return whether a function looks at values."""
        try:
            self.called(function, args, kwargs)
        except Undecided:
            return True
        return False


@final
class Slot:
    """The place of a value.

    Args:
        forms: computes forms.
        like: the value's form, or a tensor on no device ("meta") with its shape and type.
        device: the value's device, if it is not that of the form.
        grad: whether the value takes a gradient.
    """

    __slots__ = ("_device", "_like", "forms", "grad", "value")

    def __init__(
        self, forms: Forms, like: Tensor, device: torch.device | None, *, grad: bool
    ) -> None:
        self.forms, self._like, self._device, self.grad = forms, like, device, grad
        self.value: Tensor | None = None

    @property
    def form(self) -> Tensor:
        """The value's form, made when a function first needs it: most calls pass values on."""
        if self._device is not None:
            like, device, self._device = self._like, self._device, None
            with self.forms.mode:
                self._like = torch.empty(like.shape, dtype=like.dtype, device=device)
        return self._like

    def told(self, getter: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the shape, type or device that a function asks for."""
        like = self.form if getter == _DEVICE else self._like
        return getter(like, *args, **kwargs)


@final
class Absent(Tensor):
    """A tensor of another rank. Its value may have arrived since."""

    slot: Slot

    @classmethod
    def of(
        cls, forms: Forms, like: Tensor, device: torch.device | None = None, *, grad: bool
    ) -> Absent:
        """Return an absent tensor of a form, which `Slot` takes."""
        shell = torch.empty(0, device="meta").as_subclass(cls)
        shell.__dict__["slot"] = Slot(forms, like, device, grad=grad)
        return shell

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        absent = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Absent)]
        empty = next((leaf for leaf in absent if leaf.slot.value is None), None)
        if empty is None:
            args, kwargs = present((args, kwargs))
            return func(*args, **kwargs)
        if func == _REQUIRES_GRAD:
            return empty.slot.grad
        if func == _GRAD_FN:
            return None
        if func in _OF_FORM and empty is args[0]:
            return empty.slot.told(func, args[1:], kwargs)
        if not is_walking() and func not in _OF_FORM:
            raise UsageError(
                "a tensor that forward has kept belongs to another rank's layers",
                where=f"a read of it by {getattr(func, '__name__', func)}",
                do="let forward return it, for the loss_fn that parallelize returned",
            )
        if func in LOOKS:
            raise Undecided(getattr(func, "__name__", str(func)))
        return empty.slot.forms.called(func, args, kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        slot = self.slot
        return f"Absent({tuple(slot.form.shape)}, {slot.form.dtype})"


def is_empty(leaf: Any) -> bool:
    """Return whether a value is an absent tensor that has no value yet."""
    return isinstance(leaf, Absent) and leaf.slot.value is None


def present(values: Any) -> Any:
    """Return values with arrived tensors in the places of absent ones."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Absent) and leaf.slot.value is not None:
            return leaf.slot.value
        return leaf

    return mapped(value, values)


def _device(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.device


_REQUIRES_GRAD = getattr(Tensor, "requires_grad").__get__  # noqa: B009
_GRAD_FN = getattr(Tensor, "grad_fn").__get__  # noqa: B009
_DEVICE = getattr(Tensor, "device").__get__  # noqa: B009
LOOKS = frozenset({Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__})
_OF_FORM = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
    ]
)
