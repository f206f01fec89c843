"""Batch normalisation by the rows of all ranks, as autograd operators.

    forward    mean, squared deviations and number of this rank's rows  ─▶ every rank
               all ranks add them up in rank order, so that the sums have the same bits
    backward   this rank's sums of dy and of dy·x̂, times its rows' weight  ─▶ every rank
               dx = γ/σ · (dy − mean dy − x̂ · mean(dy·x̂)), over the rows of all ranks

γ and β have this rank's own gradients, which travel like any other layer's. Gradients of rows carry
this rank's weight (contracts/row_weights.py): the sums are multiplied by it as they leave, and the
results are divided by it again.

Costs a rank 2C+1 numbers to every other one in forward and 2C in backward, for C channels, and one
more pass over the rows in each. The main thread waits for both. Guarded by
tests/equivalence/test_sync_batchnorm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import UNWEIGHED, Weighing
from shoal.core.errors import UsageError


class Synchronised(_BatchNorm):
    """A batch norm over the rows of all ranks (strategies/sync_batchnorm.py)."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of each channel, over the rows of all ranks."""

    mean: Tensor
    var: Tensor  # biased, as it is used to normalise
    count: float  # rows times places


@dataclass(frozen=True)
class NormOfRanks:
    """One norm's way to the statistics of all ranks' rows."""

    layer: str
    comm: Comm
    weighs: Weighing = UNWEIGHED

    def gathered(self, numbers: Tensor, purpose: str) -> Tensor:
        """Every rank's numbers, a row a rank."""
        self.comm.journal.begins(purpose)
        everyone = numbers.new_empty(self.comm.size, len(numbers))
        self.comm.all_gather(everyone.unbind(), numbers)
        return everyone

    def statistics(self, x: Tensor) -> Statistics:
        """Compute the statistics of x, (K, C, …) on each rank. Some ranks may have no row.

        Raises:
            UsageError: all ranks together have at most one value a channel.
        """
        mode = "training" if torch.is_grad_enabled() else "training, but no_grad"
        with torch.no_grad():
            return self._statistics(x, f"{mode}, batch norm {self.layer}")

    def _statistics(self, x: Tensor, purpose: str) -> Statistics:
        channels, kind = x.shape[1], sums_kind(x.dtype)
        count = x.numel() // max(channels, 1)
        own = torch.zeros(2 * channels + 1, dtype=kind, device=x.device)
        if count:
            own[:channels], own[channels:-1] = _mean_and_squares(x, kind)
            own[-1] = count
        everyone = self.gathered(own, purpose)
        counts, means = everyone[:, -1:], everyone[:, :channels]
        # Shoal reads this value for itself: no module decides by it which layers to call
        with torch._C.DisableTorchFunction():
            total = float(counts.sum())
        if total <= 1:
            raise UsageError(
                "batch norm needs more than one value a channel in training, on all ranks together",
                where=f"layer {self.layer}",
                got=f"{total:g}",
                do="give more rows a step, or leave out a last batch of one row",
            )
        mean = (means * counts).sum(0) / total
        squares = everyone[:, channels:-1].sum(0) + (counts * (means - mean).square()).sum(0)
        return Statistics(mean, squares / total, total)


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: Statistics,
    ranks: NormOfRanks,
) -> Tensor:
    """Normalise x by statistics that depend on x, also in the gradient.

    Args:
        x: (K, C, …) rows of this rank.
        weight: (C,), γ, or None.
        bias: (C,), β, or None.
        eps: added to the variance.
        statistics: the statistics of x on all ranks.
        ranks: the ranks that they come from.
    """
    out: Tensor = _Normalise.apply(x, weight, bias, eps, statistics, ranks)  # type: ignore[no-untyped-call]
    return out


def sums_kind(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums over values of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _mean_and_squares(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each channel's mean, and its sum of squared deviations from it."""
    wide = x.to(kind)
    if x.device.type == "cpu":  # one pass, as in torch's own batch norm
        mean, var = torch.batch_norm_update_stats(wide, None, None, 0.0)
    else:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = torch.var_mean(wide, dims, correction=0)
    return mean, var * (x.numel() // x.shape[1])


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: Statistics,
        ranks: NormOfRanks,
    ) -> Tensor:
        kind = sums_kind(x.dtype) if weight is None else weight.dtype
        mean, var = statistics.mean.to(kind), statistics.var.to(kind)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.ranks = eps, statistics.count, ranks
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ranks: NormOfRanks = ctx.ranks
        if torch.is_grad_enabled():
            return *_gradients_again(ctx, dy), None, None, None
        x, weight, mean, var = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if x.numel():
            saved: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
            factor = weight
            if x.device.type != "cpu":  # the GPU's kernel reads these, as if forward had saved them
                kind = sums_kind(x.dtype)
                saved = mean.to(kind), (var.to(kind) + ctx.eps).rsqrt()
                factor = torch.ones_like(mean) if weight is None else weight
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, factor, mean, var, *saved, False, ctx.eps, [True, True, True]
            )
        else:
            dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if needs_x:
            means = _mean_sums(torch.cat([dbias, dweight]), x, ctx.count, ranks)
            mean_dy, mean_dy_x = means.to(mean.dtype).chunk(2)
            scale = torch.rsqrt(var + ctx.eps)
            if weight is not None:
                scale = scale * weight
            # x̂ · γ/σ·mean(dy·x̂) + γ/σ·mean dy, in the one pass of a norm
            dx -= F.batch_norm(
                x, mean, var, scale * mean_dy_x, scale * mean_dy, False, 0.0, ctx.eps
            )
        return (
            dx if needs_x else None,
            dweight if needs_weight else None,
            dbias if needs_bias else None,
            None,
            None,
            None,
        )


def _gradients_again(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, γ and β, with a graph.

    They also depend on x through the mean and the variance over all ranks' rows.
    """
    x, weight, mean, _ = ctx.saved_tensors
    ranks: NormOfRanks = ctx.ranks
    kind = sums_kind(x.dtype)
    dims, places = [dim for dim in range(x.dim()) if dim != 1], (1, -1, *[1] * (x.dim() - 2))
    wide, dy = x.to(kind), dy.to(kind)
    purpose = f"backward, batch norm {ranks.layer}"

    def mean_over_ranks(values: Tensor, weight: float = 1.0) -> Tensor:
        summed: Tensor = _WeighedSum.apply(  # type: ignore[no-untyped-call]
            values.sum(dims), ranks, purpose, weight, 1 / weight
        )
        return summed.div(float(ctx.count)).view(places)

    deviation = wide - mean_over_ranks(wide)
    scale = torch.rsqrt(mean_over_ranks(deviation.square()) + ctx.eps)
    normal = deviation * scale
    weighs = _weight(ranks, x)
    rest = dy - mean_over_ranks(dy, weighs) - normal * mean_over_ranks(dy * normal, weighs)
    dx = rest * (scale if weight is None else scale * weight.to(kind).view(places))
    of_weight, of_bias = (dy * normal).sum(dims), dy.sum(dims)
    return dx.to(x.dtype), of_weight.to(mean.dtype), of_bias.to(mean.dtype)


class _WeighedSum(torch.autograd.Function):
    """The sum over ranks of their numbers. `into` multiplies the numbers, `out_of` the sum."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, ranks: NormOfRanks, purpose: str, into: float, out_of: float
    ) -> Tensor:
        ctx.ranks, ctx.purpose, ctx.factors = ranks, purpose, (into, out_of)
        return ranks.gathered(own * into, purpose).sum(0) * out_of

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        into, out_of = ctx.factors
        weight = ctx.ranks.weighs() or 1.0  # no rows have weight 0
        back: Tensor = _WeighedSum.apply(  # type: ignore[no-untyped-call]
            grad, ctx.ranks, f"backward, {ctx.purpose}", weight * out_of, into / weight
        )
        return back, None, None, None, None


def _mean_sums(own: Tensor, x: Tensor, count: float, ranks: NormOfRanks) -> Tensor:
    """Return the mean over all ranks' rows of sums, in terms of this rank's own loss."""
    weight = _weight(ranks, x)
    wide = own.to(sums_kind(x.dtype))
    everyone = ranks.gathered(
        wide if weight == 1.0 else wide * weight, f"backward, batch norm {ranks.layer}"
    )
    return everyone.sum(0) / (count * weight)


def _weight(ranks: NormOfRanks, x: Tensor) -> float:
    """Return the weight of this rank's rows in the running backward; 1 if it has no rows.

    Raises:
        UsageError: the rows have weight 0.
    """
    weight = ranks.weighs()
    if weight == 0 and x.numel():
        raise UsageError(
            "this rank's rows weigh nothing in the loss, yet batch norm takes them into account",
            where=f"layer {ranks.layer}",
            do="leave out rows that the loss does not count, on every rank",
        )
    return weight or 1.0
