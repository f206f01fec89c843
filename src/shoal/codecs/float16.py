"""Values as float16: half of the bytes, 11 bits of precision, at most 65,504.

A larger value goes as the largest float16, and its rest goes with the next values. An infinite
value stays infinite, so that a loss scaler sees the overflow.

Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.codecs.cast import Cast

_LARGEST = torch.finfo(torch.float16).max


@final
@dataclass(frozen=True)
class Float16(Cast):
    """Two bytes a value, rounded to the nearest."""

    name: ClassVar[str] = "float16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16

    def holds(self, values: Tensor) -> bool:
        # no value is larger than the root of all squares
        return float(torch.dot(values, values)) <= _LARGEST**2
