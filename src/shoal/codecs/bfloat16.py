"""Values as bfloat16: half of the bytes, the range of float32, 8 bits of precision.

Float64 has larger values. They go as the largest bfloat16, and their rest goes with the next
values. Values of float32 are not checked. They fit, except the last 0.2 % below its largest.

Reference: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.cast import Cast

_LARGEST = torch.finfo(torch.bfloat16).max


@final
@dataclass(frozen=True)
class BFloat16(Cast):
    """Two bytes a value, rounded to the nearest."""

    name: ClassVar[str] = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def holds(self, values: Tensor) -> bool:
        return values.dtype != torch.float64 or float(torch.dot(values, values)) <= _LARGEST**2
