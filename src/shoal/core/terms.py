"""Terms of a loss: the things that it is a mean over, and the tensor that shows their number."""

from __future__ import annotations

from dataclasses import dataclass

# tensor that shows the number of rows in a call
INPUT, OUTPUT, TARGET = "input", "output", "target"
# weight of a rank in a gradient: by its rows or terms, or the same for all ranks
WEIGH = ("rows", "ranks")


@dataclass(frozen=True)
class Targets:
    """Targets as one of torch's losses counts them: some are ignored, others weighted by class.

    Args:
        path: the way to the targets through containers and objects.
        skipped: number of targets that are left out at the beginning of each row.
        ignored: the target that does not count.
        weights: the weight of each class; empty: every target counts 1.
        held_as: dotted attribute of the loss that holds the weights, if it has one. It is read
            anew at each call.
        by_size: whether all targets count 1, so that their number is seen without a look at them.
    """

    path: tuple[int | str, ...] = ()
    skipped: int = 0
    ignored: int = -100
    weights: tuple[float, ...] = ()
    held_as: str = ""
    by_size: bool = False


@dataclass(frozen=True)
class LossOfParts:
    """Loss of some rows that is not the mean, or the sum, of the losses of two parts of them.

    Args:
        first: number of rows in the first part.
        second: number of rows in the second part.
        whole: the loss of all of them.
        by_parts: the mean, or the sum, of the losses of both parts.
    """

    first: int
    second: int
    whole: float
    by_parts: float


@dataclass(frozen=True)
class Terms:
    """Way to count the rows of a batch: by the product of some dimensions of a tensor.

    Args:
        source: the holder of the tensor: input, output or target.
        path: the way to the tensor through containers and objects. If it is empty, the tensor is
            the first one.
        dims: the dimensions of the tensor.
        summed: whether the loss is a sum over rows, not a mean.
        kept: whether modules keep values that they compute, which a loss may use, too.
        targets: how the loss counts its targets, if it is a mean over these.
        unlike: a sign that the loss is no mean and no sum over rows, if there is one.
    """

    source: str = INPUT
    path: tuple[int | str, ...] = ()
    dims: tuple[int, ...] = (0,)
    summed: bool = False
    kept: bool = False
    targets: Targets | None = None
    unlike: LossOfParts | None = None


OF_ROWS = Terms()  # a mean over rows, which are the first dimension of the first tensor
