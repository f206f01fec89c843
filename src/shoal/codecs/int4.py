"""Values as 15 steps of the largest in their block, for the way back. To owners they go as int8.

    code   │ largest / 7 of each block, float32 │ steps, one of each half to a byte │

Owners send back small changes, and one owner keeps the loss of each, not every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.blocks import check_block, in_blocks, in_steps, scales
from shoal.codecs.int8 import Int8
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import NOTHING_LOST, LearningPrice

_STEPS = 7


@final
@dataclass(frozen=True)
class Int4(Codec):
    """Half a byte a value, and four bytes a block."""

    name: ClassVar[str] = "int4"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.2
    learning: ClassVar[LearningPrice] = NOTHING_LOST
    block: int = 64

    def __post_init__(self) -> None:
        check_block(
            "the block of int4 is an even number, from 2 to 65,536 values",
            self.block,
            2,
            do="leave it out: it is 64",
        )

    @property
    def there(self) -> Codec:
        return Int8()

    def nbytes(self, numel: int, itemsize: int) -> int:
        num_blocks = -(-numel // self.block)
        return 4 * num_blocks + num_blocks * self.block // 2

    def encode(self, values: Tensor, state: State) -> Tensor:
        rows = in_blocks(values, self.block)
        scale = scales(rows, _STEPS)
        sizes = scale.view(-1).to(torch.float32, copy=True)
        steps = in_steps(rows, scale, _STEPS)
        low, high = steps.add_(_STEPS + 1).to(torch.uint8).view(2, -1)
        return torch.cat([sizes.view(torch.uint8), high.bitwise_left_shift_(4).add_(low)])

    def decode(self, code: Tensor, into: Tensor) -> None:
        num_blocks = -(-len(into) // self.block)
        sizes, packed = code[: 4 * num_blocks].view(torch.float32), code[4 * num_blocks :]
        whole = num_blocks * self.block
        rows = into if whole == len(into) else into.new_empty(whole)
        low, high = rows.view(2, -1)
        low.copy_(packed & 15)
        high.copy_(packed >> 4)
        rows.sub_(_STEPS + 1).view(num_blocks, -1).mul_(sizes[:, None])
        if rows is not into:
            into.copy_(rows[: len(into)])
