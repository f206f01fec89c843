"""A parameter that is cut along one dimension: each rank holds some rows or columns of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.rows import in_rows
from shoal.tensors.cut import SpreadCut


@final
class OverRanks(SpreadCut):
    """Every rank r has `sizes[r]` of dimension `dim`, in rank order. Reading is a collective."""

    def __init__(
        self,
        name: str,
        whole: Tensor,
        dim: int,
        sizes: Sequence[int],
        comm: Comm,
        weighs: Weighing = UNWEIGHED,
    ) -> None:
        super().__init__(name, whole, comm, weighs)
        self._dim, self._sizes = dim, list(sizes)

    def part(self, whole: Tensor) -> Tensor:
        if whole.layout is not torch.strided:
            return self._part_of_rows(whole)
        part: Tensor = whole.split(self._sizes, self._dim)[self.comm.rank]
        return part

    def _part_of_rows(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a gradient that is a sparse tensor, as a view of them."""
        start, size = sum(self._sizes[: self.comm.rank]), self._sizes[self.comm.rank]
        whole = whole.coalesce()
        ids = whole.indices()[0]
        ends = torch.tensor([start, start + size], device=ids.device)
        own = slice(*torch.searchsorted(ids, ends).tolist())
        shape = size, *whole.shape[1:]
        return in_rows(ids[own] - start, whole.values()[own], shape, coalesced=True)

    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self._shapes()]

    def _shapes(self) -> list[list[int]]:
        """Return the shape of each rank's part."""
        shapes = [list(self.like.shape) for _ in self._sizes]
        for shape, size in zip(shapes, self._sizes, strict=True):
            shape[self._dim] = size
        return shapes

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        formed = zip(parts, self._shapes(), strict=True)
        return torch.cat([part.view(shape) for part, shape in formed], self._dim)

    def gathered(self, part: Tensor, purpose: str) -> Tensor:
        if part.layout is not torch.strided:
            return self._whole_of_rows(part, purpose)[0]
        return self.gathered_by(self.comm.numbers(self.own_numbers(part), purpose), part)

    def own_numbers(self, part: Tensor) -> list[int]:
        return [part.numel()] * self.comm.size

    def gathered_by(self, told: Sequence[int], part: Tensor) -> Tensor:
        pieces = [part.new_empty(shape) for shape in self._shapes()]
        self.comm.all_to_all(pieces, [part.contiguous()] * len(pieces))
        return torch.cat(pieces, self._dim)

    def mean(self, wholes: Tensor) -> Tensor:
        self.comm.numbers([wholes.numel()] * self.comm.size, f"penalty on {self.name}")
        outgoing = [piece.contiguous() for piece in wholes.split(self._sizes, self._dim)]
        incoming = [
            torch.empty_like(self.part(wholes), memory_format=torch.contiguous_format)
            for _ in outgoing
        ]
        self.comm.all_to_all(incoming, outgoing)
        return torch.stack(incoming).mean(0)

    def _show_all(self, parameter: Tensor, local: Tensor) -> None:
        if local.layout is torch.strided:
            super()._show_all(parameter, local)
        else:
            self._show(parameter, *self._whole_of_rows(local, f"reading of {self.name}.grad"))

    def _whole_of_rows(self, local: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
        """Return the whole of a sparse tensor from every rank's rows, and this rank's part of it.

        The part's values are a view of the whole's values (a collective).
        """
        comm, local = self.comm, local.coalesce()
        own_ids, own_rows = local.indices()[0], local.values()
        told = comm.numbers([len(own_ids)] * comm.size, purpose)
        ids = own_ids.new_empty(sum(told))
        rows = own_rows.new_empty(sum(told), *own_rows.shape[1:])
        comm.all_to_all(ids.split(told), [own_ids] * comm.size)
        comm.all_to_all(rows.split(told), [own_rows] * comm.size)
        starts = torch.tensor([0, *self._sizes[:-1]], device=ids.device).cumsum(0)
        anywhere = ids + starts.repeat_interleave(torch.tensor(told, device=ids.device))
        whole = in_rows(anywhere, rows, self.like.shape, coalesced=True)
        own = rows.split(told)[comm.rank]
        return whole, in_rows(own_ids, own, local.shape, coalesced=True)
