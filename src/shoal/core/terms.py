"""What a loss is a mean over, and where the number is seen, as a sample has shown it."""

from __future__ import annotations

from dataclasses import dataclass

# where the rows of a call are counted
INPUT, OUTPUT, TARGET = "input", "output", "target"


@dataclass(frozen=True)
class Terms:
    """How the rows of a batch are counted: by the product of some dimensions of a tensor.

    Args:
        source: whose tensor it is.
        path: the way to it through containers and objects. Without one it is the first tensor.
        dims: which of its dimensions.
        summed: whether the loss is a sum over rows, not a mean.
        kept: whether modules keep what they compute, of which a loss may be made, too.
    """

    source: str = INPUT
    path: tuple[int | str, ...] = ()
    dims: tuple[int, ...] = (0,)
    summed: bool = False
    kept: bool = False


OF_ROWS = Terms()  # a mean over rows, which are the first dimension of the first tensor
