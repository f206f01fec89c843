"""Parameters as lines of memory, and pieces of them that owners update.

A line holds a tensor's elements in the order in which its parameter keeps them in memory. That
order may differ from the shape's (`channels_last`). So a piece of a parameter is always a view of
it, and can be updated in place.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def cut(flat: Tensor, parts: int) -> list[Tensor]:
    """Cut a flat tensor into `parts` views that differ by one element at most, larger first."""
    return list(torch.tensor_split(flat, parts))


def cut_sizes(numel: int, parts: int) -> list[int]:
    """Return the sizes of the slices that `cut` makes."""
    base, extra = divmod(numel, parts)
    return [base + (i < extra) for i in range(parts)]


def no_elements(tensor: Tensor) -> Tensor:
    """Return a view of none of a tensor's elements: the part of a rank that has none."""
    return tensor.reshape(-1)[:0]


def chunks_of(flat: Tensor, chunk_bytes: int) -> list[Tensor]:
    """Cut a flat tensor into views of so many bytes. None is empty, and the last may be smaller."""
    return list(flat.split(max(1, chunk_bytes // flat.itemsize))) if flat.numel() else []


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements `start` to `stop` of one parameter's line."""

    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, tensor: Tensor) -> Tensor:
        """Return these elements of the parameter itself (a view), or of a tensor of its shape."""
        flat = line(tensor, self.parameter)
        return flat if self.numel == len(flat) else flat[self.start : self.stop]

    def formed(self, flat: Tensor) -> Tensor:
        """Return a view of the piece's elements, in the parameter's shape and strides if it is
        whole.
        """
        return shape_like(flat, self.parameter) if self.numel == self.parameter.numel() else flat


def line(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Flatten a tensor in the order of the parameter's memory; a view if both lie alike."""
    if parameter.is_contiguous() and tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().permute(_order(parameter)).reshape(-1)


def shape_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of the line in the parameter's shape and strides."""
    plain = flat.view(parameter.shape)
    if plain.stride() == parameter.stride():
        return plain
    order = _order(parameter)
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([parameter.shape[dim] for dim in order]).permute(back)


def lined_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's dimensions in the order of its line."""
    return tuple(parameter.shape[dim] for dim in _order(parameter))


def has_line(parameter: Tensor) -> bool:
    """Return whether the parameter's elements are adjacent in memory, so that its line is a
    view.
    """
    return parameter.detach().permute(_order(parameter)).is_contiguous()


def _order(parameter: Tensor) -> list[int]:
    """Return the parameter's dimensions, the slowest first."""
    strides = parameter.stride()
    return sorted(range(parameter.dim()), key=lambda dim: -strides[dim])


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that autograd keeps on this rank; `.grad` may be a larger tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # read the attribute of the tensor itself
        gradient: Tensor | None = _GRAD.__get__(parameter)
    return gradient


def set_local_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set the gradient, or None, where autograd accumulates on this rank."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, gradient)


def is_clearing(caller: FrameType) -> bool:
    """Return whether the caller is a function of torch that only sets gradients to None."""
    return caller.f_code in _CLEARING and bool(caller.f_locals["set_to_none"])


def is_tracing(caller: FrameType) -> bool:
    """Return whether a compiler is asking, which looks at gradients of a graph's inputs."""
    return (caller.f_globals.get("__name__"), caller.f_code.co_name) in _TRACING


def warn_of_clipping(caller: FrameType) -> None:
    """Warn if torch's clipping by the norm of all gradients asks for a gradient in parts."""
    frames = caller, caller.f_back or caller  # a comprehension has a frame of its own
    if any(frame.f_code is _CLIPPING for frame in frames):
        warnings.warn(
            "torch.nn.utils.clip_grad_norm_ brings the gradients of layers that no rank has whole "
            "to every rank, in each step. optimizer.clip_grad_norm_(max_norm) clips alike and "
            "sends one number",
            stacklevel=6,
        )


_CLIPPING = inspect.unwrap(nn.utils.clip_grad_norm_).__code__
_GRAD: Any = vars(torch._C.TensorBase)["grad"]
_TRACING = frozenset(  # names, because torch imports these modules late
    {
        ("torch._dynamo.variables.builder", "safe_has_grad"),
        ("torch._subclasses.meta_utils", "safe_grad"),
    }
)
_CLEARING = frozenset(
    inspect.unwrap(method).__code__ for method in (nn.Module.zero_grad, Optimizer.zero_grad)
)


def spans(
    sizes: Sequence[int], shares: Sequence[float], owners: Sequence[int | None]
) -> list[list[tuple[int, int, int]]]:
    """Return the owned elements of each rank: whole tensors, and of the others the cut by
    `share_out`.

    Args:
        sizes: elements of each tensor.
        shares: share of each rank in the tensors that are cut, as a part of 1.
        owners: the rank that has all of a tensor; None if it is cut.

    Returns:
        For each rank its spans, by tensor and element.
    """
    whole = [owner is not None for owner in owners]
    cut_sizes = [0 if is_whole else size for is_whole, size in zip(whole, sizes, strict=True)]
    owned = share_out(cut_sizes, shares)
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if owner is not None and size:
            owned[owner].append((index, 0, size))
    return [sorted(spans_of_rank) for spans_of_rank in owned]


def share_out(sizes: Sequence[int], shares: Sequence[float]) -> list[list[tuple[int, int, int]]]:
    """Cut tensors, laid end to end, so that each owner has its share of the elements.

    Args:
        sizes: elements of each tensor.
        shares: share of each owner, as a part of 1.

    Returns:
        For each owner its spans: the number of the tensor, its first element, and the end.
    """
    owned: list[list[tuple[int, int, int]]] = []
    cuts = [0, *(round(sum(sizes) * share) for share in accumulate(shares[:-1])), sum(sizes)]
    index, start = 0, 0
    for left in (end - begin for begin, end in pairwise(cuts)):
        spans: list[tuple[int, int, int]] = []
        while left:
            stop = min(start + left, sizes[index])
            if stop > start:
                spans.append((index, start, stop))
            left -= stop - start
            index, start = (index, stop) if stop < sizes[index] else (index + 1, 0)
        owned.append(spans)
    return owned
