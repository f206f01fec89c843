"""What a layer cut by its outputs gives: it looks like this rank's rows of all outputs, and is not gathered.

Rank r has its own outputs of all ranks' rows. What models do with logits, and between two linear layers, stays cut:

    casts, scaling, shifts, activations     done to the part; dropout draws numbers of its own on every rank
    views, slices, picks of rows            done to a tensor of row numbers; the cut dimension stays the last
    a linear layer cut by its inputs        takes the part as it is (strategies/pair.py)
    cross_entropy                           peers are told a row's target, and return four sums; four numbers go back
    argmax, topk                            each rank's best, and the best of those

Anything else gathers the outputs of this rank's rows first. All of it are collectives: every rank does the same.
Why not torch's loss_parallel: that needs DTensors on a device mesh of processes, and parameters that are DTensors,
where here parameters stay the user's own objects and ranks may be threads.
Reference: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross entropy).
Guarded by tests/equivalence/test_head.py and test_pair.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shoal.comm.boundary import Rows, refuse_second_derivative, rows_of_all
from shoal.core.errors import UsageError

_After = Callable[[Tensor], Tensor]
Use = int | str  # rows of a loss that is computed of it; the layer that takes it as it is; 0: it is gathered after all


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@final
class CutOutput(Tensor):
    """This rank's rows of an output, of which it has a part of all ranks' rows; itself without memory (`meta`)."""

    _part: Tensor  # (all ranks' rows, this rank's outputs)
    _rows: Rows
    _widths: tuple[int, ...]  # each rank's outputs
    _numbers: Tensor  # of this rank's rows, in the shape of the leading dimensions
    _after: _After  # what every ordinary tensor made of it goes through
    _tell: Callable[[Use], None]

    @classmethod
    def of(
        cls,
        part: Tensor,
        rows: Rows,
        widths: Sequence[int],
        numbers: Tensor,
        after: _After = _as_it_is,
        tell: Callable[[Use], None] = lambda use: None,
    ) -> CutOutput:
        """An output whose row `i` of this rank stands wherever `numbers` is i."""
        like = torch.empty((*numbers.shape, sum(widths)), dtype=part.dtype, device="meta")
        logits: CutOutput = like.as_subclass(cls)
        logits._part, logits._rows, logits._widths, logits._numbers = part, rows, tuple(widths), numbers
        logits._after, logits._tell = after, tell
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, CutOutput):
            if func in _OF_THE_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _OF_THE_PART:
                return func(first._part, *args[1:], **kwargs)
            done = first._cut(func, args[1:], kwargs if args else {k: v for k, v in kwargs.items() if k != "input"})
            if done is not None:
                return done
        return func(*_whole(args), **_whole(kwargs))

    def over(self, after: _After) -> CutOutput:
        """The same, and what is made of it goes through `after`, too."""
        before = self._after
        return CutOutput.of(self._part, self._rows, self._widths, self._numbers, lambda t: after(before(t)), self._tell)

    def taken_by(self, layer: str, widths: Sequence[int]) -> tuple[Rows, Tensor] | None:
        """The rows of all ranks and this rank's part of them, for a layer whose inputs are cut in the same way."""
        numbers = self._numbers.reshape(-1)
        all_in_order = torch.equal(
            numbers, torch.arange(self._rows.counts[self._rows.comm.rank], device=numbers.device)
        )
        if not all_in_order or tuple(widths) != self._widths or self._after is not _as_it_is:
            return None
        self._tell(layer)
        return self._rows, self._part

    def whole(self) -> Tensor:
        """This rank's rows with all outputs: gathered."""
        self._tell(0)
        rows_of_all(self._rows.comm, len(self._numbers), "gathering of an output that is cut")
        rows = self._rows.to_rows(self._part, self._widths, 1 / self._rows.comm.size)
        return self._after(rows[self._numbers.reshape(-1)].view(self.shape))

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the function gives where that needs no gathering, else None."""
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set")):
            raise UsageError(
                f"{name} on an output that is cut over the ranks would change a copy of it",
                do="write it out of place (out = out / 2), or pin the layer to column",
            )
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is F.dropout:
            return self._with(_dropout(self._part, self._rows.comm.rank, *args, **kwargs))
        if name in _ELEMENTWISE and not any(
            isinstance(leaf, Tensor) and leaf.dim() for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return self._with(func(self._part, *args, **kwargs))
        if name == "contiguous":
            return self
        if name in _VIEWS:
            return self._view(func, args, kwargs)
        if name in ("argmax", "topk") and not (name == "topk" and torch.is_grad_enabled() and self._part.requires_grad):
            return self._best(name, *args, **kwargs)
        return None

    def _with(self, part: Tensor) -> CutOutput:
        return CutOutput.of(part, self._rows, self._widths, self._numbers, self._after, self._tell)

    def _viewed(self, numbers: Tensor) -> CutOutput:
        return CutOutput.of(self._part, self._rows, self._widths, numbers, self._after, self._tell)

    def _view(self, func: Any, args: Any, kwargs: Any) -> CutOutput | tuple[CutOutput, ...] | None:
        """The function on row numbers, where it leaves the class dimension where it is."""
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            return self._viewed(self._numbers[args[0]]) if args[0].dim() <= self._numbers.dim() else None
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        classes = sum(self._widths)
        wide = self._numbers.contiguous().unsqueeze(-1).expand(*self._numbers.shape, classes)  # takes no memory
        viewed = func(wide, *args, **kwargs)
        views = viewed if isinstance(viewed, tuple) else (viewed,)
        if any(not v.dim() or v.shape[-1] != classes or (classes > 1 and v.stride(-1)) for v in views):
            return None
        cut = tuple(self._viewed(v[..., 0]) for v in views)
        return cut if isinstance(viewed, tuple) else cut[0]

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """As torch's, from three terms a row: log Σ exp, the target's logit, and Σ w·logit where labels are smooth."""
        if target.shape != self._numbers.shape or target.dim() > 1 or target.is_floating_point():
            return None  # class probabilities, or classes that are not the last dimension
        if size_average is not None or reduce is not None or (weight is not None and weight.requires_grad):
            return None
        self._tell(target.numel())
        classes = sum(self._widths)
        flat = target.reshape(-1)
        kept = flat != ignore_index
        wanted = torch.where(kept, flat, 0)
        if bool(((wanted < 0) | (wanted >= classes)).any()):
            raise IndexError(f"a target is not one of {classes} classes")
        part = self._part.float() if self._part.dtype in (torch.float16, torch.bfloat16) else self._part
        of_class = part.new_ones(classes) if weight is None else weight.to(part.dtype)
        log_sum, picked, summed = _RowTerms.apply(  # type: ignore[no-untyped-call]
            part, self._rows, self._widths, self._numbers.reshape(-1), wanted, of_class if label_smoothing else None
        )
        its = torch.where(kept, of_class[wanted], 0.0)
        losses = its * (log_sum - picked)
        if label_smoothing:
            spread = torch.where(kept, of_class.sum() * log_sum - summed, 0.0)
            losses = (1 - label_smoothing) * losses + label_smoothing / classes * spread
        if not torch.is_autocast_enabled(part.device.type):
            losses, its = losses.to(self._part.dtype), its.to(self._part.dtype)
        if reduction == "none":
            return self._after(losses.view(target.shape))
        total = losses.sum()
        return self._after(total / its.sum() if reduction == "mean" else total)

    @torch.no_grad()
    def _best(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The best class of each row, or the k best."""
        arguments = dict(zip(("dim", "keepdim") if name == "argmax" else _TOPK, args, strict=False)) | kwargs
        dim, keepdim = arguments.pop("dim", None if name == "argmax" else -1), arguments.pop("keepdim", False)
        k = arguments.pop("k", 1)
        if arguments.pop("sorted", True) is not True or arguments.pop("largest", True) is not True or arguments:
            return None
        if dim not in (-1, self.dim() - 1):
            return None
        values, classes = _best_of_rows(self._part, self._rows, self._widths, k)
        flat, shape = self._numbers.reshape(-1), (*self._numbers.shape, k)
        values, classes = values[flat].view(shape), classes[flat].view(shape)
        if name == "topk":
            return torch.return_types.topk((values, classes))
        return classes if keepdim else classes[..., 0]


def _dropout(part: Tensor, rank: int, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As torch's, with numbers of this rank's own also where all ranks have one random state: parts are of one row."""
    if not training or p == 0.0:
        return F.dropout(part, p, training, inplace)
    if not 0.0 < p <= 1.0:
        raise ValueError(f"a probability of dropout is between 0 and 1, and this is {p}")
    seed = int(torch.randint(1 << 62, ()))
    numbers = torch.rand(
        part.shape, device=part.device, generator=torch.Generator(part.device).manual_seed(seed + rank)
    )
    kept = (numbers >= p).to(part.dtype).div_(max(1 - p, torch.finfo(part.dtype).tiny))
    return part.mul_(kept) if inplace else part * kept


def _whole(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.whole() if isinstance(leaf, CutOutput) else leaf, values)


def _starts(sizes: Sequence[int], rank: int) -> int:
    return list(accumulate(sizes, initial=0))[rank]


class _RowTerms(torch.autograd.Function):
    """Of picked rows: log Σ exp, the logit of the row's target, and Σ w·logit with weights of the classes."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        rows: Rows,
        widths: Sequence[int],
        numbers: Tensor,
        targets: Tensor,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        comm = rows.comm
        picked = rows_of_all(comm, len(numbers), "cross entropy of an output that is cut")
        mine = torch.stack([numbers + _starts(rows.counts, comm.rank), targets], 1)
        everyone = mine.new_empty(sum(picked.counts), 2)
        comm.all_gather(everyone.split(picked.counts), mine)
        row, wanted = everyone.unbind(1)
        every_row = len(row) == len(part) and bool((row == torch.arange(len(part), device=row.device)).all())
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
        most = parts[:, :, 0].amax(0)
        log_sum = most + torch.log((parts[:, :, 1] * torch.exp(parts[:, :, 0] - most)).sum(0))
        ctx.save_for_backward(part, row, at, here, log_sum, of_class)
        ctx.picked, ctx.every_row = picked, every_row
        return log_sum, parts[:, :, 2].sum(0), parts[:, :, 3].sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        part, row, at, here, log_sum, of_class = ctx.saved_tensors
        comm = ctx.picked.comm
        mine = torch.stack([*(grad / comm.size for grad in grads), log_sum], 1)
        everyone = mine.new_empty(len(row), 4)
        comm.all_gather(everyone.split(ctx.picked.counts), mine)
        by_sum, by_pick, by_weight, log_sums = everyone.unbind(1)
        logits = part if ctx.every_row else part[row]
        slope = torch.exp(logits - log_sums.unsqueeze(1)).mul_(by_sum.unsqueeze(1))
        slope[at, here[at]] += by_pick[at]
        if of_class is not None:
            slope.addr_(by_weight, of_class)
        if not ctx.every_row:
            slope = torch.zeros_like(part).index_add_(0, row, slope)
        return slope, None, None, None, None, None


def _best_of_rows(part: Tensor, rows: Rows, widths: Sequence[int], k: int) -> tuple[Tensor, Tensor]:
    """(values, classes) of the k best classes of each of this rank's rows."""
    comm = rows.comm
    values, classes = part.topk(min(k, part.shape[1]), 1)
    offered = [min(k, width) for width in widths]
    comm.numbers([k] * comm.size, "best of an output that is cut")
    found = []
    for own in (values, classes + _starts(widths, comm.rank)):
        parts = [own.new_empty(rows.counts[comm.rank], number) for number in offered]
        comm.all_to_all(parts, own.contiguous().split(rows.counts))
        found.append(torch.cat(parts, 1))
    best, place = found[0].topk(k, 1)
    return best, found[1].gather(1, place)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_TOPK = ("k", "dim", "largest", "sorted")
_OF_THE_SHAPE = frozenset(
    {
        *map(_getter, ("shape", "ndim", "dtype")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.__len__,
        Tensor.is_floating_point,
    }
)
_OF_THE_PART = frozenset(map(_getter, ("device", "requires_grad", "is_cuda", "layout", "is_leaf", "grad_fn")))
_ELEMENTWISE = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "clone", "detach"),
        *("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "clamp", "negative", "subtract", "multiply"),
        *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__neg__"),
        *(
            "relu",
            "relu6",
            "leaky_relu",
            "elu",
            "selu",
            "celu",
            "gelu",
            "silu",
            "mish",
            "sigmoid",
            "softplus",
            "square",
        ),
        *("hardtanh", "hardsigmoid", "hardswish", "softsign", "logsigmoid"),
    )
)
_VIEWS = frozenset(
    (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "__getitem__", "transpose", "permute"),
        *("narrow", "select", "chunk", "split", "unbind", "movedim"),
    )
)
