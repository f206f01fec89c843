"""`mean` and `gather`: values of all ranks for scripts, in which each rank has its own rows.

Collectives over the session's channel of the ranks that train, for a loss or an accuracy now and
then. Every rank sends every other its value or its form, with a label. So if a rank makes another
call, all ranks get an error. A lone process, also before `init`, sends nothing. A loss may be
computed from gathered rows: see gather.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.numbers import MOST_COUNTED, check_number
from shoal.front.gather import FORWARD, RowsOfRanks
from shoal.session.session import ranks

# a tensor's type, shape and device, whether it needs gradients, and whether these are on
_Form = tuple[str, tuple[int, ...], str, bool, bool]
_DO = "give the same kind of value on every rank"


@overload
def mean(value: Tensor, weight: float | Tensor = 1.0) -> Tensor: ...
@overload
def mean(value: float, weight: float | Tensor = 1.0) -> float: ...
def mean(value: float | Tensor, weight: float | Tensor = 1.0) -> float | Tensor:
    """Return the mean of a value over all ranks, the same on every rank (a collective).

    Args:
        value: a number, or a tensor of the same shape on every rank. Its history is not used.
        weight: how much this rank's value counts: usually the number of rows in its mean.
            A rank without rows gives 0, and its value is left alone, even if that is NaN.

    Returns:
        A float, or a tensor of that shape, at the same device. If all weights are 0, it is NaN,
        with a warning.

    Raises:
        UsageError: the value is no number, the weight is none or below 0, or ranks give other
            shapes.
        WorldError: a rank was lost.

    Examples:
        >>> import shoal
        >>> _ = shoal.init()
        >>> shoal.mean(0.5, weight=12)
        0.5
    """

    def checked() -> tuple[Tensor, float]:
        own_weight = _number(weight, "the weight")
        rule, do = "the weight of a mean is a number of rows", "give for instance weight=len(x)"
        check_number(rule, own_weight, 0, MOST_COUNTED, do=do)
        if isinstance(value, Tensor):
            return value.detach().cpu().to(_wide(value)), own_weight
        return _on_cpu(_number(value, "the value")), own_weight

    told = _tell(checked, "shoal.mean()")
    _check_alike([tuple(tensor.shape) for tensor, _ in told], "shoal.mean()")
    weights = [own for _, own in told]
    if not any(weights):
        warnings.warn(
            "shoal.mean: the weight is 0 on every rank, so the mean is NaN: no rank had a row",
            stacklevel=2,
        )
    terms = [tensor * own for tensor, own in told if own]
    total = sum(terms, torch.zeros_like(told[0][0])) / (sum(weights) or math.nan)
    if not isinstance(value, Tensor):
        return float(total)
    is_number = value.is_floating_point() or value.is_complex()
    return total.to(value.device, value.dtype if is_number else torch.get_default_dtype())


def gather(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, one rank's after another's, on every rank (a collective).

    A loss may be computed from them: gradients find back to the rank that has a row, as the sum of
    the gradients of all ranks. So a loss that compares rows with one another is exact. Train by it
    with `weigh="ranks"`, and use the gathered rows on every rank.

    Args:
        tensor: rows along its first dimension, as many as this rank has; other dimensions and the
            type are the same on every rank. A tensor without a dimension is one row.

    Returns:
        A tensor at the same device, in the order of the ranks. It has a history if gradients are
        on, on every rank, and a rank's tensor needs them.

    Raises:
        UsageError: the argument is no tensor, or ranks give other shapes or types.
        WorldError: a rank was lost.

    Examples:
        >>> import shoal, torch
        >>> _ = shoal.init()
        >>> shoal.gather(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    own = list[Tensor]()

    def checked() -> _Form:
        rows = _rows_of(tensor)
        own.append(rows)
        needs = rows.requires_grad, torch.is_grad_enabled()
        return str(rows.dtype), tuple(rows.shape), rows.device.type, *needs

    told = _tell(checked, FORWARD)
    rows, comm = own[0], ranks()
    if len(told) == 1:
        return torch.cat([rows])
    # a rank without rows may not know their form
    filled = [form for form in told if form[1] != (0,)] or told
    dtype, shape, *_ = filled[0]
    form = dtype, *shape[1:]
    _check_alike(
        [form if of[1] == (0,) else (of[0], *of[1][1:]) for of in told],
        FORWARD,
    )
    if rows.shape == (0,):
        rows = rows.to(getattr(torch, dtype.removeprefix("torch."))).reshape(0, *shape[1:])
    counts, devices = tuple(of[1][0] for of in told), {of[2] for of in told}
    gathered = RowsOfRanks(comm, counts, at_host=len(devices) > 1)
    keeps = any(of[3] for of in told) and all(of[4] for of in told)
    return gathered.with_history(rows) if keeps else gathered.gathered(rows)


def _rows_of(tensor: Any) -> Tensor:
    """Return a tensor's rows, whole; UsageError if it has none."""
    if not isinstance(tensor, Tensor):
        raise UsageError(
            "shoal.gather takes a tensor",
            got=type(tensor).__name__,
            do="give a tensor of this rank's rows, as torch.tensor(values)",
        )
    if tensor.layout is not torch.strided:
        raise UsageError(
            "shoal.gather takes a dense tensor",
            got=str(tensor.layout),
            do="give tensor.to_dense()",
        )
    rows = tensor if tensor.dim() else tensor.reshape(1)
    # convert an output that is cut over ranks, or at other hosts
    return rows if type(rows) in (Tensor, nn.Parameter) else torch.cat([rows])


def _tell(work: Callable[[], Any], purpose: str) -> Sequence[Any]:
    """Return every rank's result of that work. An error on one of them is an error on all."""
    comm = ranks()
    try:
        own, mistake = work(), ""
    except UsageError as error:
        own, mistake = None, str(error)
        if comm.size == 1:
            raise
        comm.gather_objects((own, mistake), purpose)
        raise
    if comm.size == 1:
        return [own]
    told = comm.gather_objects((own, mistake), purpose)
    for rank, (_, text) in enumerate(told):
        if text:
            raise RanksDiffer(
                f"rank {rank} cannot take part in {purpose}: {text}",
                do="see that rank's own message",
                rank=rank,
            )
    return [each for each, _ in told]


def _check_alike(forms: Sequence[tuple[Any, ...]], purpose: str) -> None:
    for rank, form in enumerate(forms):
        if form != forms[0]:
            raise RanksDiffer(
                f"rank {rank} and rank 0 give {purpose} unlike tensors",
                got=f"rank {rank}: {form}",
                expected=f"as on rank 0: {forms[0]}",
                do=_DO,
                rank=rank,
            )


def _on_cpu(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex128 if value.is_complex() else torch.float64


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # also of several
        raise UsageError(
            f"{what} of a mean is no number",
            got=repr(value)[:80],
            do="give a number, or for the value a tensor",
        ) from error
