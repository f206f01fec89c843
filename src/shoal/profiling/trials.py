"""Trials of a loss on some rows: is it a mean or a sum over rows, and do parts make the whole?

Ranks have parts of the rows, and weigh their losses by the number of them. That is right for a loss
that is a mean over rows. Class weights, masks, norms and rows that are compared with one another
make other losses. Two trials tell:

    kind     the loss of some rows, of the same rows twice, and three times
    parts    the loss of two unlike parts of these rows. The rows are in the order of their targets,
             and the parts of other sizes on each rank, so that a sum over ranks inside shows, too

The trials tell nothing about a loss that differs from call to call, a loss that does not take
parts, and numbers that are not finite. They cost seven calls of the loss on at most 24 rows.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.terms import LossOfParts

LOGGER = logging.getLogger(__name__)
LossOf = Callable[[Sequence[int]], float]  # takes numbers of rows

MEAN, SUM, NEITHER, UNKNOWN = "mean", "sum", "neither", "unknown"
FEW = 8  # number of rows for a trial
_NEAR = 1e-3  # relative difference of losses that are the same
_ROUNDINGS = 4  # number of roundings by which losses may differ
_STEADY = 1e-5  # relative difference of two calls for the same rows
_DO = (
    "Say how many terms it is a mean over: parallelize(…, count=lambda output, y: …), or with a "
    'compute_loss count=lambda batch: … If every rank\'s loss counts alike, say weigh="ranks". '
    'If it compares rows with one another, gather them by shoal.gather, and say weigh="ranks".'
)


class Tried(NamedTuple):
    """A loss that was tried on some rows: its kind, and its value at the start and at the end."""

    kind: str
    first: float = nan
    last: float = nan


@dataclass(frozen=True)
class Trying:
    """Settings for trying a loss.

    Args:
        counted: whether the caller counts the loss's terms. Then its parts tell nothing.
        rank: this rank. Sizes of parts differ from rank to rank.
        near: relative difference up to which two losses count as equal.
        once: whether to try one pair of parts only, because the model runs for each.
    """

    counted: bool = False
    rank: int = 0
    near: float = _NEAR
    once: bool = False

    def parts(self, loss_of: LossOf, rows: Sequence[int], tried: Tried) -> LossOfParts | None:
        """Compare the loss of some rows with that of two parts of them."""
        if self.counted or not _is_steady(tried.first, tried.last):
            return None
        try:
            return self._unlike(loss_of, rows, tried)
        except Exception as error:
            LOGGER.debug("the loss takes no parts of the sample: %s", error)
            return None

    def _unlike(self, loss_of: LossOf, rows: Sequence[int], tried: Tried) -> LossOfParts | None:
        first = _size(len(rows), self.rank)
        every = 2 + self.rank % 3
        others = [row for index, row in enumerate(rows) if index % every != 1]
        found = None
        for parts in ((rows[:first], rows[first:]), (rows[1::every], others)):
            # call it with one row, too, as often as other ranks do, because the loss may wait for
            # them
            losses = [loss_of(part or rows) for part in parts]
            if all(parts) and all(map(isfinite, losses)):
                found = found or self._unlike_parts(parts, losses, tried)
                if self.once:
                    break
        return found

    def _unlike_parts(
        self, parts: Sequence[Sequence[int]], losses: Sequence[float], tried: Tried
    ) -> LossOfParts | None:
        rows = [*parts[0], *parts[1]]
        shares = [1 if tried.kind == SUM else len(part) / len(rows) for part in parts]
        together = [share * loss for share, loss in zip(shares, losses, strict=True)]
        scale = max(abs(tried.first), sum(map(abs, together)))
        if abs(tried.first - sum(together)) <= self.near * scale:
            return None
        return LossOfParts(len(parts[0]), len(parts[1]), tried.first, sum(together))


def in_order(number: int, tensor: Tensor | None, most: int = FEW) -> list[int]:
    """Return at most so many rows, in the order of the sums of their values in a tensor."""
    if tensor is None or number < 2:
        return list(range(min(number, most)))
    values = tensor.detach().reshape(number, -1)
    values = (values.abs() if values.is_complex() else values).double().sum(1)
    order = values.nan_to_num().argsort(stable=True).tolist()
    picked = min(number, most)
    return [order[index * number // picked] for index in range(picked)]


def _size(number: int, rank: int) -> int:
    """Return the size of the first part: at least 2 rows if there are 4."""
    least = min(2, number // 2)
    return max(least, min(number - least, number * (1 + rank % 3) // 4))


def _is_steady(first: float, last: float) -> bool:
    """Return whether two losses of the same rows are equal, so that it neither draws nor counts."""
    return isfinite(first) and abs(first - last) <= _STEADY * max(abs(first), abs(last))


def nearness(model: nn.Module, output: Any = None) -> float:
    """Return the relative difference up to which two losses count as equal, by their dtypes.

    Losses of one output differ less than losses of a model that runs again, on other rows.
    """
    values = [*model.parameters(), *pytree.tree_leaves(output)]
    kinds = {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        kinds.add(torch.bfloat16)
    # a GPU may choose another kernel for other rows
    runs_on_gpu = output is None and any(p.is_cuda for p in model.parameters())
    least = _NEAR if runs_on_gpu else _NEAR / 10
    return max([least, *(_ROUNDINGS * torch.finfo(kind).eps for kind in kinds)])


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a module normalises by the rows of a batch also while it is evaluated."""
    norms = nn.modules.batchnorm._BatchNorm
    return any(isinstance(m, norms) and m.running_mean is None for m in model.modules())


def warn_of_unlike(loss: Any, found: LossOfParts) -> None:
    """Warn of a loss that is no mean and no sum over rows."""
    warnings.warn(
        f"the loss {_name(loss)} is no mean over rows: {found.first + found.second} rows of the "
        f"sample have {found.whole:.6g}, and parts of {found.first} and {found.second} of them "
        f"make {found.by_parts:.6g}. Ranks are weighed by rows, so training differs from one "
        f"process. {_DO}",
        stacklevel=3,
    )


def _name(loss: Any) -> str:
    if loss is None:
        return "that the model returns"
    while hasattr(loss, "func"):  # functools.partial
        loss = loss.func
    code = getattr(loss, "__code__", None)
    name = getattr(loss, "__qualname__", "") or type(loss).__name__
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


def matters(loss_of: LossOf, number: int) -> bool:
    """Return whether the loss of some rows differs from that of all, so that they do matter."""
    try:
        return number > 1 and not near(loss_of(range(number // 2)), loss_of(range(number)))
    except Exception:  # half of a list such as [x, y] is no batch
        return False


def kind_of(loss_of: LossOf, rows: Sequence[int]) -> Tried:
    """Try a loss on some rows once, twice and three times.

    It is called in rising and then in falling order, so that a term that grows from call to call
    (an annealed one) cancels out.
    """
    rows, found = list(rows), list[float]()
    try:
        for times in (1, 2, 3, 2, 1):
            found.append(loss_of(rows * times))
    except Exception:  # the loss may take no other rows than its own, or no row twice
        return Tried(UNKNOWN, *_again(loss_of, rows, found[:1]))
    first, second, thrice, fourth, last = found
    once, twice = (first + last) / 2, (second + fourth) / 2
    if not (isfinite(once) and once):
        return Tried(UNKNOWN, first, last)
    kind, (more, still_more) = UNKNOWN, (twice - once, thrice - twice)
    if near(twice, once) and near(thrice, once):
        kind = MEAN
    elif near(twice, 2 * once) and near(thrice, 3 * once):
        kind = SUM
    elif abs(more) > _NEAR * abs(once) and abs(more - still_more) <= _NEAR * abs(more):
        kind = NEITHER if first == last else UNKNOWN
    return Tried(kind, first, last)


def _again(loss_of: LossOf, rows: Sequence[int], found: Sequence[float]) -> Sequence[float]:
    """Return the first and last loss of rows that it does not take twice; () without any."""
    try:
        return [*found, loss_of(rows)] if found else ()
    except Exception:
        return ()


def near(a: float, b: float) -> bool:
    """Return whether two losses are the same but for rounding."""
    return abs(a - b) <= _NEAR * max(abs(a), abs(b))
