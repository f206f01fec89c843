"""A parameter that one rank holds, or a group of ranks. Others get it from there to read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.pieces import no_elements
from shoal.tensors.cut import SpreadCut


@final
class OnRank(SpreadCut):
    """One rank holds all of a parameter, the others nothing. Reading it is a collective.

    Args:
        name: the parameter's dotted name.
        whole: the parameter.
        holder: the rank that holds it.
        comm: all ranks.
        weighs: tells the weight of this rank's rows in the running backward.
        copies: further ranks that hold it, with the same values.
    """

    def __init__(
        self,
        name: str,
        whole: Tensor,
        holder: int,
        comm: Comm,
        weighs: Weighing = UNWEIGHED,
        copies: Sequence[int] = (),
    ) -> None:
        super().__init__(name, whole, comm, weighs)
        self.holder, self._holding = holder, {holder, *copies}
        self.takes_hooks = not copies  # of several each has a part of the gradient in backward

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the parameter."""
        return self.comm.rank in self._holding

    @property
    def is_counted(self) -> bool:
        return self.comm.rank == self.holder

    def part(self, whole: Tensor) -> Tensor:
        return whole if self.is_here else no_elements(whole)

    def numels(self) -> list[int]:
        return [self.like.numel() if rank == self.holder else 0 for rank in range(self.comm.size)]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.holder].view(self.like.shape)

    def gathered(self, part: Tensor, purpose: str) -> Tensor:
        return self.gathered_by(self.comm.numbers(self.own_numbers(part), purpose), part)

    def own_numbers(self, part: Tensor) -> list[int]:
        return [self.holder] * self.comm.size

    def gathered_by(self, told: Sequence[int], part: Tensor) -> Tensor:
        whole = part.new_empty(self.like.shape)  # also here: no caller gets the own memory of it
        if self.is_here:
            whole.copy_(part)
        self.comm.broadcast(whole, self.holder)
        return whole

    def mean(self, wholes: Tensor) -> Tensor:
        size, rank = self.comm.size, self.comm.rank
        self.comm.numbers([wholes.numel()] * size, f"penalty on {self.name}")
        empty = wholes.new_empty(0)
        own = wholes.contiguous()
        outgoing = [own if to in self._holding else empty for to in range(size)]
        incoming = [torch.empty_like(own) if self.is_here else empty for _ in range(size)]
        incoming[rank] = outgoing[rank]
        self.comm.all_to_all(incoming, outgoing)
        return torch.stack(incoming).mean(0) if self.is_here else empty
