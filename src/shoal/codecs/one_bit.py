"""Values as their signs, and the mean size of their block: 28 times fewer bytes.

    code   │ mean size of each block, float32 │ signs, a bit each │

One step has a large error. Its losses are sent later.
Reference: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs", Interspeech 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from shoal.codecs.blocks import check_block, in_blocks
from shoal.codecs.ranges import MOST, within
from shoal.contracts.codec import Codec, State
from shoal.contracts.learning import LATER, LearningPrice


@final
@dataclass(frozen=True)
class OneBit(Codec):
    """A bit a value, and four bytes a block."""

    name: ClassVar[str] = "one_bit"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.7
    learning: ClassVar[LearningPrice] = LearningPrice(1.27, LATER)
    block: int = 256

    def __post_init__(self) -> None:
        check_block(
            "the block of one_bit is a multiple of 8, from 8 to 65,536 values",
            self.block,
            8,
            do="leave it out: it is 256",
        )

    def nbytes(self, numel: int, itemsize: int) -> int:
        return -(-numel // 8) + 4 * -(-numel // self.block)

    def encode(self, values: Tensor, state: State) -> Tensor:
        sums = in_blocks(values.abs(), self.block).sum(dim=1).float()
        sums[:-1].div_(self.block)
        sums[-1:].div_(len(values) - (len(sums) - 1) * self.block)
        if not isfinite(sums.sum()):
            sums = self._means(values.double())
        return torch.cat([sums.view(torch.uint8), _pack_bits(values >= 0)])

    def _means(self, values: Tensor) -> Tensor:
        """Return each block's mean size, although a sum of sizes may exceed float32's range."""
        means = in_blocks(values.abs() / self.block, self.block).sum(dim=1)
        means[-1:].mul_(self.block / (len(values) - (len(means) - 1) * self.block))
        return within(means, MOST).float()

    def decode(self, code: Tensor, into: Tensor) -> None:
        num_blocks = -(-len(into) // self.block)
        sizes = code[: 4 * num_blocks].view(torch.float32)
        signs = _unpack(code[4 * num_blocks :], len(into))
        short = num_blocks * self.block - len(into)
        rows = into.new_empty(len(into) + short) if short else into
        rows[len(into) :].zero_()
        rows[: len(into)].copy_(signs)
        rows.mul_(2).sub_(1).view(num_blocks, -1).mul_(sizes[:, None])
        if short:
            into.copy_(rows[: len(into)])


def _pack_bits(bits: Tensor) -> Tensor:
    """Pack eight bits to a byte, the first in its lowest place."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    rows = pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (rows << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        dim=1, dtype=torch.uint8
    )


def _unpack(code: Tensor, numel: int) -> Tensor:
    if code.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(code.numpy(), count=numel, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=code.device)
    return ((code[:, None] >> places) & 1).view(-1)[:numel]
