"""Values as 255 steps of the largest in their block: a quarter of the bytes.

    code   │ largest / 127 of each block, float32 │ steps, int8 │

A block with NaN, or with an infinite value, is NaN for all ranks.
Reference: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.blocks import check_block, in_blocks, in_steps, scales
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import NOTHING_LOST, LearningPrice

_STEPS = 127


@final
@dataclass(frozen=True)
class Int8(Codec):
    """One byte a value, and four bytes a block."""

    name: ClassVar[str] = "int8"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.05
    learning: ClassVar[LearningPrice] = NOTHING_LOST
    block: int = 256

    def __post_init__(self) -> None:
        check_block(
            "the block of int8 is from 1 to 65,536 values",
            self.block,
            1,
            do="leave it out: it is 256",
        )

    def nbytes(self, numel: int, itemsize: int) -> int:
        return numel + 4 * -(-numel // self.block)

    def encode(self, values: Tensor, state: State) -> Tensor:
        code = torch.empty(self.nbytes(len(values), 0), dtype=torch.uint8, device=values.device)
        return self.encode_into(values, state, code)

    def encode_into(self, values: Tensor, state: State, code: Tensor) -> Tensor:
        rows = in_blocks(values, self.block)
        head, tail = code.split([4 * len(rows), len(values)])
        scale = scales(rows, _STEPS)
        head.view(torch.float32).copy_(scale.view(-1))
        tail.view(torch.int8).copy_(in_steps(rows, scale, _STEPS).view(-1)[: len(values)])
        return code

    def decode(self, code: Tensor, into: Tensor) -> None:
        sizes, steps = self._split(code, len(into))
        if steps.numel() == len(into) and into.dtype == torch.float32:
            into.view(steps.shape).copy_(steps).mul_(sizes[:, None])
        else:
            into.copy_(self._values(sizes, steps)[: len(into)])

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        into.add_(self._values(*self._split(code, len(into)))[: len(into)])

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        sizes, steps = self._split(code, len(into))
        if steps.numel() == len(into) and into.dtype == torch.float32:
            # only the coding rank computes this, because other processors may round it differently
            into.view(steps.shape).addcmul_(steps.float(), sizes[:, None], value=-1)
        else:
            into.sub_(self._values(sizes, steps)[: len(into)])

    def _values(self, sizes: Tensor, steps: Tensor) -> Tensor:
        return steps.float().mul_(sizes[:, None]).view(-1)

    def _split(self, code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return the scales, and the steps of whole blocks, as rows."""
        sizes, steps = code.split([4 * -(-numel // self.block), numel])
        return sizes.view(torch.float32), in_blocks(steps.view(torch.int8), self.block)
