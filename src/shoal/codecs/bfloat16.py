"""Values as bfloat16: half of the bytes, the range of float32, 8 bits of precision.

Reference: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from shoal.codecs.cast import Cast


@final
@dataclass(frozen=True)
class BFloat16(Cast):
    """Two bytes a value, rounded to the nearest."""

    name: ClassVar[str] = "bfloat16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16
