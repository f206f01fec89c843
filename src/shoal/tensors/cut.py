"""A parameter of which this rank holds a part. A reader of the parameter sees the whole.

    the layer, and optimizer.step()    work on the part                                (`opened`)
    torch functions, printing, saving  see the whole, from wherever the rest is     (`Cut.whole`)
    `.grad`                            the whole gradient; changes of it in place count
    changes in place, `.data`          reach every part of it                  (tensors/cut_data.py)

It has the whole's shape, strides and size. So state_dict, load_state_dict, copies, averaged
weights, clipping and penalties work as in one process. If the other ranks hold the rest
(sharded_parameter.py, rank_parameter.py), all of them read it together, or one rank reads it alone
(contracts/attendance.py). For a rest on servers see remote/tables.py. Guarded by
tests/equivalence/test_cut.py.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.pieces import (
    is_clearing,
    is_tracing,
    local_gradient,
    set_local_gradient,
    warn_of_clipping,
)
from shoal.tensors.cut_changes import CUT, change, refused, replace_by, written_by
from shoal.tensors.cut_data import OF_THE_PART, OF_THE_SHAPE, CutData, moves_nothing


class Cut(ABC):
    """A parameter's division: this rank's part, and the way to the rest."""

    is_spread: ClassVar[bool] = False  # whether the ranks together hold all of it
    takes_hooks: bool = False  # whether autograd brings the gradient, so that hooks see it

    def __init__(self, name: str, whole: Tensor, comm: Comm, weighs: Weighing = UNWEIGHED) -> None:
        self.name = name
        self.comm = comm
        self.weighs = weighs
        self.like = torch.empty_like(whole, device="meta", memory_format=torch.contiguous_format)
        self.layout = torch.empty_like(whole, device="meta")  # the whole's strides in memory
        self.buffer: Tensor | None = None  # a gradient's memory, kept from one backward to the next
        self._seen: Tensor | None = None  # the whole gradient that was read last
        self._its_part: Tensor | None = None  # the local gradient at that time, a view of it
        self._version = 0  # the version of that whole gradient

    @abstractmethod
    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole's shape, as a view."""

    @abstractmethod
    def whole(self, part: Tensor) -> Tensor:
        """Return the whole, given this rank's part."""

    def restore(self, part: Tensor) -> Tensor:
        """Return the whole on all ranks at once (a collective)."""
        return self.whole(part)

    @abstractmethod
    def mean(self, wholes: Tensor) -> Tensor:
        """Return this rank's part of the mean of every rank's tensor (a collective)."""

    @abstractmethod
    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Apply an element-wise function in place, with arguments of the parameter's shape."""

    @abstractmethod
    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        """Return the whole gradient. The local gradient becomes a view of it.

        This is a collective unless the gradient was read and has not changed since.
        """

    def assign(self, parameter: Tensor, whole: Tensor | None) -> None:
        """Make a tensor the whole gradient from now on; None clears it."""
        if whole is None:
            self._seen = self._its_part = None
            set_local_gradient(parameter, None)
        elif whole.layout is torch.strided:
            self._show(parameter, whole)
        else:  # a reader is shown another tensor, because this one may have any id several times
            self._seen = self._its_part = None
            set_local_gradient(parameter, self.part(whole))

    def settle(self, parameter: Tensor) -> Tensor | None:
        """Return the local gradient.

        If a sparse tensor is changed in place, it gets new values, and no view sees them. So
        changes of the whole gradient are then repeated on the part.
        """
        local, seen = local_gradient(parameter), self._seen
        if seen is not None and seen.layout is not torch.strided and local is self._its_part:
            if seen._version != self._version:
                self._show(parameter, seen)
            return self._its_part
        return local

    def _show(self, parameter: Tensor, whole: Tensor, part: Tensor | None = None) -> None:
        self._seen, self._its_part = whole, self.part(whole) if part is None else part
        set_local_gradient(parameter, self._its_part)
        self._version = whole._version


class SpreadCut(Cut):
    """A division over the ranks, which together hold the whole parameter."""

    is_spread = True
    takes_hooks = True

    @abstractmethod
    def numels(self) -> list[int]:
        """Return the number of elements of each rank's part."""

    @abstractmethod
    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole, given the elements of every rank's part in order."""

    @abstractmethod
    def gathered(self, part: Tensor, purpose: str) -> Tensor:
        """Return the whole of a tensor of the parameter's form, from all parts (a collective).

        Messages name the `purpose`.
        """

    @property
    def _reading(self) -> str:
        return f"reading of {self.name} (state_dict, print, grad)"

    def restore(self, part: Tensor) -> Tensor:
        return self.gathered(part, self._reading)

    @abstractmethod
    def gathered_by(self, told: Sequence[int], part: Tensor) -> Tensor:
        """Return the whole of a tensor of the parameter's form, once ranks have told their numbers.

        This is a collective.
        """

    @abstractmethod
    def own_numbers(self, part: Tensor) -> list[int]:
        """Return the numbers that this rank tells before its part is gathered."""

    def whole(self, part: Tensor) -> Tensor:
        attendance = self.comm.attendance
        if attendance is None:
            return self.gathered(part, self._reading)  # save 4
        told = attendance.numbers(self.own_numbers(part), self._reading)
        return attendance.whole(self).clone() if told is None else self.gathered_by(told, part)

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        def part(leaf: Any) -> Any:
            if isinstance(leaf, CutData) and leaf.is_all_of(self):
                return leaf.local
            if isinstance(leaf, CutParameter):
                return self._part_of(leaf) if leaf.shape == self.like.shape else leaf
            if isinstance(leaf, Tensor) and leaf.dim():
                return self.part(leaf.expand(self.like.shape))
            return leaf

        args, kwargs = pytree.tree_map(part, (tuple(args), dict(kwargs)))
        attendance = self.comm.attendance
        changing = nullcontext() if attendance is None else attendance.changing()
        with torch._C.DisableTorchFunctionSubclass(), changing:
            function(subject, *args, **kwargs)

    def _part_of(self, other: Tensor) -> Tensor:
        """Return this rank's part of another parameter of the same shape."""
        its_cut, part = cut_of(other), part_of(other)
        if isinstance(its_cut, SpreadCut) and its_cut.numels() == self.numels():
            return part
        return self.part(its_cut.whole(part))

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        local = self.settle(parameter)
        if local is None:
            return None
        if (
            self._seen is None
            or local is not self._its_part
            or self._seen._version != self._version
        ):
            self._show_all(parameter, local)
        return self._seen

    def _show_all(self, parameter: Tensor, local: Tensor) -> None:
        self._show(parameter, self.gathered(local, self._reading))


class CutParameter(nn.Parameter):
    """A parameter of which this rank holds a part."""

    @property
    def grad(self) -> Tensor | None:
        """The mean gradient over the global batch, of the whole parameter: a collective."""
        local, caller = local_gradient(self), sys._getframe(1)
        if is_clearing(caller) or is_tracing(caller) or caller.f_code is _APPLY:
            return local
        if not cut_of(self).comm.rank:
            warn_of_clipping(caller)
        with torch.inference_mode(False):  # the gradient is used outside inference mode later
            return cut_of(self).gradient(self, local)

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        cut_of(self).assign(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        cut_of(self).assign(self, None)

    @property
    def data(self) -> Tensor:
        """An alias of its memory outside of autograd. Reading its values is a collective."""
        if not cut_of(self).is_spread:
            raise refused(self, ".data")
        return CutData.of(cut_of(self), part_of(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        replace_by(self, value, _wholes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subject = args[0] if args and isinstance(args[0], CutParameter) else None
        if func in _OF_AUTOGRAD or (subject is not None and func in OF_THE_PART):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch._has_compatible_shallow_copy_type:
            return True  # `.to()` and similar methods ask this before they assign `.data`
        if subject is not None:
            if func in OF_THE_SHAPE:
                return func(cut_of(subject).like, *args[1:], **kwargs)
            if moves_nothing(func, part_of(subject), args[1:], kwargs):
                return subject
            view = _view(subject, func, args[1:], kwargs)
            if view is not None:
                return view
        if written := written_by(func, args, kwargs):
            return change(func, args, kwargs, written, _wholes)
        return func(*_wholes(args), **_wholes(kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo[id(self)] = nn.Parameter(cut_of(self).whole(part_of(self)), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(cut_of(self).whole(part_of(self)), self.requires_grad).__reduce_ex__(
            protocol
        )


def cut(parameter: nn.Parameter, its_cut: Cut) -> None:
    """Leave this rank only its part of a parameter, in place.

    The object stays, and the memory of the rest is freed.
    """
    gradient = parameter.grad
    parameter.grad = None
    part = its_cut.part(parameter.data).clone(memory_format=torch.contiguous_format)
    _replace_memory(parameter, part)
    if gradient is not None and gradient.layout is torch.strided:
        gradient = its_cut.part(gradient).clone(memory_format=torch.contiguous_format)
    elif gradient is not None:
        gradient = its_cut.part(gradient)
    parameter.grad = gradient
    parameter.__dict__[CUT] = its_cut
    parameter.__class__ = CutParameter


def restore(parameter: nn.Parameter) -> None:
    """Give this rank the whole parameter and its gradient again, in place (a collective)."""
    its_cut, gradient = cut_of(parameter), parameter.grad
    whole = its_cut.restore(part_of(parameter))
    parameter.grad = None
    del parameter.__dict__[CUT]
    parameter.__class__ = nn.Parameter
    _replace_memory(parameter, lay_like(its_cut.layout, whole))
    if gradient is not None:
        parameter.grad = lay_like(its_cut.layout, gradient)


def lay_like(layout: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor with the strides of `layout`: itself, if it has them already."""
    if whole.layout is not torch.strided or whole.stride() == layout.stride():
        return whole
    return torch.empty_like(layout, device=whole.device, dtype=whole.dtype).copy_(whole)


def _replace_memory(parameter: nn.Parameter, memory: Tensor) -> None:
    """Put a tensor of another shape into a parameter.

    A loss that is still alive keeps autograd's accumulator of the old shape alive. Torch makes a
    new one only if the type changes, so the type changes on the way.
    """
    other = torch.float64 if parameter.dtype == torch.float32 else torch.float32
    parameter.data = memory.new_empty(0, dtype=other)
    parameter.data = memory


def cut_of(parameter: Tensor) -> Cut:
    """Return the division of a parameter that is cut."""
    its_cut: Cut = parameter.__dict__[CUT]
    return its_cut


def is_cut(parameter: Tensor) -> bool:
    """Return whether a parameter is cut."""
    return CUT in vars(parameter)


def part_of(parameter: Tensor) -> Tensor:
    """Return this rank's part, outside of autograd."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


@contextmanager
def opened(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make cut parameters ordinary ones in this context, which are this rank's parts."""
    parts: list[nn.Parameter] = [p for p in parameters if isinstance(p, CutParameter)]
    for parameter in parts:
        parameter.__class__ = nn.Parameter
    try:
        yield
    finally:
        for parameter in parts:
            parameter.__class__ = CutParameter


def _view(parameter: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return a view of a parameter, which may be changed in place; None if `func` gives none."""
    if torch.is_grad_enabled() or not cut_of(parameter).is_spread:
        return None
    return CutData.of(cut_of(parameter), part_of(parameter)).view_by(func, args, kwargs)


class _Whole(torch.autograd.Function):
    """The whole parameter, from every rank's part.

    Backward returns the mean over ranks of their gradients for this part.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, its_cut: Cut) -> Tensor:
        ctx.cut, ctx.call = its_cut, its_cut.weighs.call()
        return its_cut.whole(part_of(part))  # a plain tensor: torch's collectives check classes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight = ctx.cut.weighs(ctx.call)
        return ctx.cut.mean(grad if weight is None else grad * weight), None


def _wholes(values: Any) -> Any:
    """Return values in which every cut parameter is replaced by the whole."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, CutParameter):
            return leaf
        with torch._C.DisableTorchFunctionSubclass():
            return _Whole.apply(leaf, cut_of(leaf))  # type: ignore[no-untyped-call]

    return pytree.tree_map(whole, values)


# These functions look for autograd's accumulator, which belongs to the part.
_OF_AUTOGRAD = frozenset({torch.autograd.grad, torch.autograd.backward})
_APPLY = nn.Module._apply.__code__
