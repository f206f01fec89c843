"""Values as bfloat16: half of the bytes, the range of float32, 8 bits of precision.

Reference: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.contracts.codec import Codec, State


@final
@dataclass(frozen=True)
class BFloat16(Codec):
    """Two bytes a value, rounded to the nearest."""

    name: ClassVar[str] = "bfloat16"
    in_runs: ClassVar[bool] = True
    least_dims: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.01

    def nbytes(self, numel: int, itemsize: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, state: State) -> Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def encode_into(self, values: Tensor, state: State, code: Tensor) -> Tensor:
        code.view(torch.bfloat16).copy_(values)
        return code

    def decode(self, code: Tensor, into: Tensor) -> None:
        into.copy_(code.view(torch.bfloat16))

    def decode_add(self, code: Tensor, into: Tensor) -> None:
        into.add_(code.view(torch.bfloat16))

    def decode_subtract(self, code: Tensor, into: Tensor) -> None:
        into.sub_(code.view(torch.bfloat16))
