"""Named pieces with offsets: which elements of a whole tensor a rank has, for any later reader.

    whole    shape, and the strides that it has in memory
    piece    size, strides and offset in the memory of the whole

A row, a column, a flat slice of an owner and a tensor of one rank are all of this form. So nothing
depends on the plan under which a piece was written. Guarded by tests/checkpoint/test_extents.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.core.pieces import Piece, line
from shoal.tensors.cut import SpreadCut

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """The place of a piece in its whole tensor, counted in elements.

    Args:
        shape: shape of the whole.
        layout: strides of the whole.
        size: size of the piece.
        stride: strides of the piece, in the memory of the whole.
        offset: place of the piece's first element in that memory.
    """

    shape: Sizes
    layout: Sizes
    size: Sizes
    stride: Sizes
    offset: int

    @classmethod
    def of_cut(cls, cut: SpreadCut) -> Extent:
        """Return the place of this rank's part of a tensor that is cut."""
        whole, part = cut.like, cut.part(cut.like)
        return cls(
            tuple(whole.shape),
            tuple(whole.stride()),
            tuple(part.shape),
            tuple(part.stride()),
            int(part.storage_offset()),
        )

    @classmethod
    def of_line(cls, parameter: nn.Parameter, start: int, stop: int) -> Extent:
        """Return the place of elements `start` to `stop` of a parameter's line."""
        shape, layout = tuple(parameter.shape), tuple(parameter.stride())
        return cls(shape, layout, (stop - start,), (1,), start)

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return math.prod(self.size)

    @property
    def whole_numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def is_sound(self) -> bool:
        """Return whether the piece and the whole lie within the memory of the whole."""
        return all(
            len(size) == len(stride)
            and min((*size, *stride, 0)) >= 0
            and (not math.prod(size) or offset + _last(size, stride) < self.whole_numel)
            for size, stride, offset in (
                (self.shape, self.layout, 0),
                (self.size, self.stride, self.offset),
            )
        ) and (self.offset >= 0)

    def put(self, memory: Tensor, piece: Tensor) -> None:
        """Copy a piece into the flat memory of the whole."""
        memory.as_strided(self.size, self.stride, self.offset).copy_(piece.view(self.size))


def _last(size: Sizes, stride: Sizes) -> int:
    """Return the place of the last element, counted from the first."""
    return sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@final
@dataclass
class Owned:
    """A value of an optimizer's state. This rank owns pieces of it, or all of it.

    Args:
        pieces: each piece with its place. Without a place, it is the value itself.
    """

    pieces: list[tuple[Extent | None, Any]] = field(default_factory=list)

    def add(self, piece: Piece, value: Any) -> Owned:
        """Add the value that belongs to a piece of a parameter."""
        parameter, is_all = piece.parameter, piece.numel == piece.parameter.numel()
        form = parameter.shape if is_all else torch.Size((piece.numel,))
        if not isinstance(value, Tensor) or value.shape != form:
            self.pieces.append((None, value))
            return self
        flat = line(value, parameter) if is_all else value
        self.pieces.append((Extent.of_line(parameter, piece.start, piece.stop), flat))
        return self


class Joining:
    """A whole tensor that is put together from pieces."""

    def __init__(self, extent: Extent, dtype: torch.dtype) -> None:
        self._form = extent.shape, extent.layout, dtype
        self._memory = torch.empty(extent.whole_numel, dtype=dtype, device="cpu")
        self._there = 0

    def add(self, extent: Extent, piece: Tensor) -> None:
        """Put a piece in its place.

        Raises:
            ValueError: the piece belongs to another tensor.
        """
        form = extent.shape, extent.layout, piece.dtype
        if form != self._form or not extent.is_sound() or piece.numel() != extent.numel:
            raise ValueError(f"a piece of {form}, where one of {self._form} was expected")
        extent.put(self._memory, piece)
        self._there += extent.numel

    def whole(self) -> Tensor:
        """Return the tensor.

        Raises:
            ValueError: a piece is missing.
        """
        shape, layout, _ = self._form
        if self._there != len(self._memory):
            raise ValueError(f"{self._there:,} of {len(self._memory):,} elements of {shape}")
        return self._memory.as_strided(shape, layout)
