"""Values in blocks that each have a scale of their own."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Values as rows of a block each, with zeros behind the last; a view where none are needed."""
    short = -len(values) % block
    return (pad(values, (0, short)) if short else values).view(-1, block)
