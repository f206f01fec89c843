"""Values that the type of a code cannot hold: they travel as the largest that it can.

A finite value never becomes infinite on its way, because a sound gradient would look like one that
overflowed. The rest of it is lost for now, as by rounding. Infinite values and NaN stay, so a loss
scaler sees them. The cost is nothing until a value is that large.
"""

from __future__ import annotations

import torch
from torch import Tensor

# limits of codes with float32 in them: the smallest divisor, and the largest value
LEAST, MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def within(values: Tensor, most: float) -> Tensor:
    """Bring finite values between -most and most."""
    return torch.where(values.isinf(), values, values.clamp(-most, most))


def narrow_into(values: Tensor, narrow: Tensor) -> None:
    """Copy values into a tensor that may be of a narrower type, or into themselves."""
    if narrow is values:
        return
    narrow.copy_(values)
    if narrow.dtype != values.dtype and not narrow.sum(dtype=torch.float32).isfinite():
        narrow.copy_(within(values, torch.finfo(narrow.dtype).max))
