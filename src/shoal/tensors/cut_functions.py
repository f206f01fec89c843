"""Functions of cut outputs: sums over a row, its target's output, its best classes.

Rank r has `part`: (all ranks' rows, its own outputs). A rank makes a few numbers for each row. All
ranks' numbers are joined on the rank that has the row (`RowTerms`, `best_of_rows`) or on every
rank (`LogSum`). Gradients belong to means over ranks, as in tensors/boundary.py: a gradient that
enters a part from outside is divided by P.

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.contracts.comm import Comm
from shoal.tensors.boundary import CallRows


def dropout(
    part: Tensor, rank: int, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Apply dropout as torch does, but with random numbers that differ on every rank.

    All ranks may have the same random state, and their parts belong to the same rows.
    """
    if not training or p == 0.0:
        return F.dropout(part, p, training, inplace)
    if not 0.0 < p <= 1.0:
        raise ValueError(f"a probability of dropout is between 0 and 1, and this is {p}")
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    numbers = torch.rand(
        part.shape,
        dtype=torch.float32,
        device=part.device,
        generator=torch.Generator(part.device).manual_seed(seed + rank),
    )
    kept = (numbers >= p).to(part.dtype).div_(max(1 - p, torch.finfo(part.dtype).tiny))
    return part.mul_(kept) if inplace else part * kept


def _starts(sizes: Sequence[int], rank: int) -> int:
    return list(accumulate(sizes, initial=0))[rank]


class RowTerms(torch.autograd.Function):
    """The terms of picked rows: log Σ exp, the target's logit, and Σ w·logit with class weights."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        of_call: tuple[CallRows, CallRows],
        widths: Sequence[int],
        numbers: Tensor,
        targets: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, picked = of_call  # all rows of the part, and the picked ones
        comm = rows.comm
        own_terms = torch.stack([numbers + _starts(rows.counts, comm.rank), targets], 1)
        everyone = own_terms.new_empty(sum(picked.counts), 2)
        comm.all_gather(everyone.split(picked.counts), own_terms)
        row, wanted = everyone.unbind(1)
        every_row = len(row) == len(part) and bool(
            (row == torch.arange(len(part), device=row.device)).all()
        )
        logits = part if every_row else part[row]
        here = wanted - _starts(widths, comm.rank)
        at = torch.nonzero((here >= 0) & (here < logits.shape[1])).squeeze(1)
        of_class = None if weights is None else weights.split(list(widths))[comm.rank]
        sums = part.new_zeros(len(row), 4)
        sums[:, 0] = logits.amax(1)
        sums[:, 1] = torch.exp(logits - sums[:, :1]).sum(1)
        sums[at, 2] = logits[at, here[at]]
        if of_class is not None:
            sums[:, 3] = logits @ of_class
        parts = part.new_empty(comm.size, len(numbers), 4)
        comm.all_to_all(parts.unbind(), sums.split(picked.counts))
        log_sum = _log_sum(parts[:, :, 0], parts[:, :, 1])
        ctx.save_for_backward(part, row, at, here, log_sum, of_class)
        ctx.picked, ctx.every_row = picked, every_row
        ctx.weighs, ctx.layer = rows.weighs, rows.layer
        return log_sum, parts[:, :, 2].sum(0), parts[:, :, 3].sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _slope_again(ctx, grads), None, None, None, None, None
        part, row, at, here, log_sum, of_class = ctx.saved_tensors
        comm = ctx.picked.comm
        part_of_mean = (ctx.weighs() or 1.0) / comm.size  # a rank of weight 0 has no rows
        own_grads = torch.stack([*(grad * part_of_mean for grad in grads), log_sum], 1)
        everyone = own_grads.new_empty(len(row), 4)
        comm.journal.begins(f"backward, {ctx.picked.purpose}")
        comm.all_gather(everyone.split(ctx.picked.counts), own_grads)
        by_sum, by_pick, by_weight, log_sums = everyone.unbind(1)
        logits = part if ctx.every_row else part[row]
        slope = torch.exp(logits - log_sums.unsqueeze(1)).mul_(by_sum.unsqueeze(1))
        slope[at, here[at]] += by_pick[at]
        if of_class is not None:
            slope.addr_(by_weight, of_class)
        if not ctx.every_row:
            slope = torch.zeros_like(part).index_add_(0, row, slope)
        return slope, None, None, None, None, None


def _slope_again(ctx: Any, grads: Sequence[Tensor]) -> Tensor:
    """Return the part's gradient by `RowTerms`, with a graph."""
    part, row, at, here, log_sum, of_class = ctx.saved_tensors
    picked = replace(ctx.picked, weighs=ctx.weighs, layer=ctx.layer)
    part_of_mean = (ctx.weighs() or 1.0) / picked.comm.size
    own_grads = torch.stack([*(grad * part_of_mean for grad in grads), log_sum], 1)
    picked.comm.journal.begins(f"backward, {picked.purpose}")
    by_sum, by_pick, by_weight, log_sums = picked.gathered(picked.comm.size)(own_grads).unbind(1)
    logits = part if ctx.every_row else part[row]
    slope = torch.exp(logits - log_sums.unsqueeze(1)) * by_sum.unsqueeze(1)
    slope = slope.index_put((at, here[at]), by_pick[at], accumulate=True)
    if of_class is not None:
        slope = slope + by_weight.unsqueeze(1) * of_class
    return slope if ctx.every_row else torch.zeros_like(part).index_add(0, row, slope)


class LogSum(torch.autograd.Function):
    """The log Σ exp over all outputs, for every rank's rows, on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: CallRows) -> Tensor:
        comm = rows.comm
        most = part.amax(1)
        parts = part.new_empty(comm.size, len(part), 2)
        comm.all_gather(
            parts.unbind(), torch.stack([most, torch.exp(part - most.unsqueeze(1)).sum(1)], 1)
        )
        log_sum = _log_sum(parts[:, :, 0], parts[:, :, 1])
        ctx.save_for_backward(part, log_sum)
        ctx.comm = comm
        return log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part, log_sum = ctx.saved_tensors
        slopes: Tensor = _SumOverRanks.apply(grad, ctx.comm)  # type: ignore[no-untyped-call]
        slope = torch.exp(part - log_sum.unsqueeze(1))
        if torch.is_grad_enabled():
            return slope * slopes.unsqueeze(1), None
        return slope.mul_(slopes.unsqueeze(1)), None


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks of their numbers for all rows. Its backward is such a sum too."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        everyone = own.new_empty(comm.size, len(own))
        comm.journal.begins("backward, softmax of an output that is cut")
        comm.all_gather(everyone.unbind(), own.contiguous())
        return everyone.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


def _log_sum(most: Tensor, sums: Tensor) -> Tensor:
    """Return log Σ exp from each rank's largest output and its Σ exp below it: (ranks, rows)."""
    top = most.amax(0)
    return top + torch.log((sums * torch.exp(most - top)).sum(0))


def best_of_rows(
    part: Tensor, rows: CallRows, widths: Sequence[int], k: int
) -> tuple[Tensor, Tensor]:
    """Return (values, classes) of the k best classes of each of this rank's rows."""
    comm = rows.comm
    values, classes = part.topk(min(k, part.shape[1]), 1)
    offered = [min(k, width) for width in widths]
    found = []
    for own in (values, classes + _starts(widths, comm.rank)):
        parts = [own.new_empty(rows.counts[comm.rank], number) for number in offered]
        comm.all_to_all(parts, own.contiguous().split(rows.counts))
        found.append(torch.cat(parts, 1))
    best, place = found[0].topk(k, 1)
    return best, found[1].gather(1, place)
