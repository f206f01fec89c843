"""What a layer cut by its outputs gives: it looks like this rank's rows, and is not gathered.

Rank r has its own outputs of all ranks' rows. What models do with logits, and between two linear
layers, stays cut:

    casts, scaling, shifts, activations     done to the part; dropout draws numbers of its own on
                                            every rank
    views, slices, picks of rows            done to a tensor of row numbers; the cut dimension stays
                                            the last
    a linear layer cut by its inputs        takes the part as it is (strategies/pair.py)
    cross_entropy, nll_loss, logsumexp      peers are told a row's target, and return four sums;
    and gather of one output a row          four numbers go back; margins are written with the
                                            last two
    softmax, log_softmax                    each rank's two sums of all rows to every rank, and one
                                            number back
    argmax, topk                            each rank's best, and the best of those

Anything else gathers the outputs of this rank's rows first. A change in place and a hook bind the
object to that whole: from there on it, and views of it, are ordinary tensors (`bound`). All of it
are collectives: every rank does the same. Why not torch's loss_parallel: that needs DTensors on a
device mesh of processes, and parameters that are DTensors, where here parameters stay the user's
own objects and ranks may be threads.

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross entropy).
Guarded by tests/equivalence/test_head.py and test_pair.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.tensors.boundary import CallRows, rows_of_all, shaped
from shoal.tensors.cut_functions import LogSum, RowTerms, best_of_rows, dropout
from shoal.tensors.ghost import check_native, ghost
from shoal.tensors.in_place import HOOKS, is_change

_After = Callable[[Tensor], Tensor]


class Use(NamedTuple):
    """What takes an output: a loss, a softmax, or a layer. Without any it is gathered."""

    loss_rows: int = 0
    softmax_rows: int = 0
    layer: str = ""


class LossArguments(NamedTuple):
    """Arguments of torch's cross_entropy, and of its nll_loss, behind the output they are of."""

    target: Tensor
    weight: Tensor | None = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0  # nll_loss has none


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@final
class CutOutput(Tensor):
    """This rank's rows of an output, of which it has a part of all ranks' rows.

    Itself without memory (tensors/ghost.py).
    """

    _part: Tensor  # (all ranks' rows, this rank's outputs)
    _rows: CallRows
    _widths: tuple[int, ...]  # each rank's outputs
    _numbers: Tensor  # of this rank's rows, in the shape of the leading dimensions
    # and all of them there, as no view has changed but their shape: the same on every rank
    _in_order: bool
    _after: _After  # what every ordinary tensor made of it goes through
    _tell: Callable[[Use], None]
    _bound: Tensor | None  # the whole, once a change in place or a hook has asked for it
    _viewed_from: CutOutput | None  # the output of which this is a view,
    _viewed: _After  # and how it is made of that one's whole
    _is_used: bool  # something was made of it

    @classmethod
    def of(
        cls,
        part: Tensor,
        rows: CallRows,
        widths: Sequence[int],
        numbers: Tensor,
        tell: Callable[[Use], None] = lambda use: None,
    ) -> CutOutput:
        """An output whose row `i` of this rank stands wherever `numbers` is i."""
        grad = part.requires_grad and torch.is_grad_enabled()
        like = ghost((*numbers.shape, sum(widths)), part.dtype, part.device, grad=grad)
        logits: CutOutput = like.as_subclass(cls)
        logits._part, logits._rows, logits._widths, logits._numbers = (
            part,
            rows,
            tuple(widths),
            numbers,
        )
        logits._after, logits._tell, logits._in_order = _as_it_is, tell, True
        logits._bound, logits._viewed_from, logits._viewed = None, None, _as_it_is
        logits._is_used = False
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, CutOutput) and first.bound() is None:
            check_native(first)
            if func in _OF_THE_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _OF_THE_PART:
                return func(first._part, *args[1:], **kwargs)
            rest = kwargs if args else {k: v for k, v in kwargs.items() if k != "input"}
            done = None if is_change(func) else first._cut(func, args[1:], rest)
            if done is not None:
                first._note_use(done)
                return done
            if is_change(func) or kwargs.get("inplace") or _is_view(func, args[1:], kwargs):
                first.bind(func)
        if isinstance(out := kwargs.get("out"), CutOutput):
            out.bind(func)
        given, named = _whole((tuple(args), kwargs))
        done = func(*given, **named)
        if isinstance(first, CutOutput) and given and _shares_memory(done, given[0]):
            if first._bound is not given[0]:  # a view of it may be changed in place
                first.bind(func)
                done = func(first._bound, *given[1:], **named)
            return first if done is first._bound else done
        return out if isinstance(out, CutOutput) else done

    def bound(self) -> Tensor | None:
        """The whole to which this object, or that of which it is a view, was bound; or None."""
        if self._bound is None and self._viewed_from is not None:
            base = self._viewed_from.bound()
            self._bound = None if base is None else self._viewed(base)
        return self._bound

    def bind(self, func: Any) -> None:
        """Be the whole from here on, for a function that changes it or hooks into it.

        Raises:
            UsageError: a hook comes behind the functions of which it is to see the gradient.
        """
        if self._is_used and func.__name__ in HOOKS:
            raise UsageError(
                f"{func.__name__} on an output that is cut over the ranks comes behind its use",
                do="call it before the output is used, or give parallelize "
                f"{pins([self._rows.layer], 'column')}: its output is whole",
            )
        base = self
        while base._viewed_from is not None:
            base = base._viewed_from
        with torch.set_grad_enabled(torch.is_grad_enabled() or self._part.requires_grad):
            base._bound = base.whole()
        self.bound()

    def _note_use(self, made: Any = None) -> None:
        """Note that something was made of it, if that is no view of it."""
        first = made[0] if isinstance(made, tuple) and made else made
        if isinstance(first, CutOutput) and (first is self or first._viewed_from is self):
            return
        used: CutOutput | None = self
        while used is not None:
            used._is_used, used = True, used._viewed_from

    def over(self, after: _After) -> Tensor:
        """The same, and what is made of it goes through `after`, too."""
        if (bound := self.bound()) is not None:
            return after(bound)
        before = self._after
        return self._like(after=lambda t: after(before(t)))

    def taken_by(self, layer: str, widths: Sequence[int]) -> tuple[CallRows, Tensor] | None:
        """All ranks' rows and this rank's part of them, for a layer with inputs cut so."""
        if not self._in_order or tuple(widths) != self._widths or self._after is not _as_it_is:
            return None
        if self.bound() is not None:
            return None
        self._note_use()
        self._tell(Use(layer=layer))
        return self._rows, self._part

    def whole(self) -> Tensor:
        """This rank's rows with all outputs: gathered."""
        if (bound := self.bound()) is not None:
            return bound
        self._note_use()
        self._tell(Use())
        rows_of_all(self._rows.comm, len(self._numbers), "gathering of an output that is cut")
        rows = self._rows.to_rows(self._part, self._widths, 1 / self._rows.comm.size)
        return self._after(shaped(rows[self._numbers.reshape(-1)], self.shape))

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the function gives where that needs no gathering, else None."""
        name = getattr(func, "__name__", "")
        if func is F.cross_entropy:
            return self._loss(LossArguments(*args, **kwargs))
        if func is F.nll_loss:
            return self._loss(LossArguments(*args, **kwargs), of_log_probabilities=True)
        if name == "logsumexp":
            return self._logsumexp(*args, **kwargs)
        if name == "gather":
            return self._gather(*args, **kwargs)
        if name in ("softmax", "log_softmax"):
            return self._softmax(func, args, kwargs)
        if func is F.dropout:
            return self._with(dropout(self._part, self._rows.comm.rank, *args, **kwargs))
        if func in _DETACH:
            return self._like(part=self._part.detach())._seen_as(self, Tensor.detach)
        if name in _ELEMENTWISE and not any(map(_has_a_part, pytree.tree_leaves((args, kwargs)))):
            return self._with(func(self._part, *args, **kwargs))
        if name == "contiguous":
            return self
        if name in _VIEWS:
            return self._view(func, name in _IN_ORDER, args, kwargs)
        if name in ("argmax", "topk") and not (
            name == "topk" and torch.is_grad_enabled() and self._part.requires_grad
        ):
            return self._best(name, *args, **kwargs)
        return None

    def _with(self, part: Tensor) -> CutOutput:
        """Return the output with another part; the same object where a function gives its own."""
        return self if part is self._part else self._like(part=part)

    def _seen_as(self, base: CutOutput, viewed: _After) -> CutOutput:
        """Return this output, as a view of another one."""
        self._viewed_from, self._viewed = base, viewed
        return self

    def _like(
        self,
        part: Tensor | None = None,
        numbers: Tensor | None = None,
        after: _After | None = None,
        in_order: bool = True,
    ) -> CutOutput:
        """Return the same output, but for these; in order where this one is, too."""
        like = CutOutput.of(
            self._part if part is None else part,
            self._rows,
            self._widths,
            self._numbers if numbers is None else numbers,
            self._tell,
        )
        like._after, like._in_order = after or self._after, in_order and self._in_order
        return like

    def _view(
        self, func: Any, in_order: bool, args: Any, kwargs: Any
    ) -> CutOutput | tuple[CutOutput, ...] | None:
        """The function on row numbers, where it leaves the class dimension where it is."""
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            return (
                self._like(numbers=self._numbers[args[0]], in_order=False)
                if args[0].dim() <= self._numbers.dim()
                else None
            )
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        classes = sum(self._widths)
        # takes no memory
        wide = self._numbers.contiguous().unsqueeze(-1).expand(*self._numbers.shape, classes)
        viewed = func(wide, *args, **kwargs)
        views = viewed if isinstance(viewed, tuple) else (viewed,)
        if any(
            not v.dim() or v.shape[-1] != classes or (classes > 1 and v.stride(-1)) for v in views
        ):
            return None
        cut = tuple(self._like(numbers=v[..., 0], in_order=in_order) for v in views)
        if views and views[0].untyped_storage().data_ptr() == wide.untyped_storage().data_ptr():
            for number, part in enumerate(cut):
                part._seen_as(self, _view(func, args, kwargs, number))
        return cut if isinstance(viewed, tuple) else cut[0]

    def _loss(
        self, arguments: LossArguments, *, of_log_probabilities: bool = False
    ) -> Tensor | None:
        """Return torch's cross_entropy, or nll_loss where this output has log probabilities.

        It is made from a row's log Σ exp, target logit and, with smooth labels, Σ w·logit.
        """
        target, weight = arguments.target, arguments.weight
        label_smoothing = arguments.label_smoothing
        if target.shape != self._numbers.shape or target.dim() > 1 or target.is_floating_point():
            return None  # class probabilities, or classes that are not the last dimension
        if (
            arguments.size_average is not None
            or arguments.reduce is not None
            or (weight is not None and weight.requires_grad)
        ):
            return None
        classes = sum(self._widths)
        flat = target.reshape(-1)
        kept = flat != arguments.ignore_index
        wanted = torch.where(kept, flat, 0)
        if bool(((wanted < 0) | (wanted >= classes)).any()):
            raise IndexError(f"a target is not one of {classes} classes")
        part = self._wide()
        of_class = part.new_ones(classes) if weight is None else weight.to(part.dtype)
        log_sum, picked, summed = self._terms(wanted, of_class if label_smoothing else None)
        if of_log_probabilities:
            log_sum = torch.zeros_like(picked)
        class_weights = torch.where(kept, of_class[wanted], 0.0)
        # where none is kept, 0 ÷ 0 stays out of gradients
        losses = torch.where(kept, class_weights * (log_sum - picked), 0.0)
        if label_smoothing:
            spread = torch.where(kept, of_class.sum() * log_sum - summed, 0.0)
            losses = (1 - label_smoothing) * losses + label_smoothing / classes * spread
        if not torch.is_autocast_enabled(part.device.type):
            losses, class_weights = losses.to(self._part.dtype), class_weights.to(self._part.dtype)
        if arguments.reduction == "none":
            return self._after(losses.view(target.shape))
        total = losses.sum()
        return self._after(total / class_weights.sum() if arguments.reduction == "mean" else total)

    def _wide(self) -> Tensor:
        """The part, in what losses are computed in."""
        return (
            self._part.float()
            if self._part.dtype in (torch.float16, torch.bfloat16)
            else self._part
        )

    def _terms(
        self, wanted: Tensor, of_class: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row log Σ exp, the output that is wanted, and the sum of all with weights."""
        self._tell(Use(loss_rows=len(wanted)))
        numbers = self._numbers.reshape(-1)
        terms: tuple[Tensor, Tensor, Tensor] = RowTerms.apply(  # type: ignore[no-untyped-call]
            self._wide(), self._rows, self._widths, numbers, wanted, of_class
        )
        return terms

    def _logsumexp(self, dim: Any, keepdim: bool = False) -> Tensor | None:
        if dim not in (-1, self.dim() - 1, (-1,), [-1]):
            return None
        of_row = self._terms(torch.zeros_like(self._numbers.reshape(-1)))[0].to(self._part.dtype)
        return self._after(of_row.view(*self._numbers.shape, *[1] * keepdim))

    def _gather(self, dim: int, index: Tensor) -> Tensor | None:
        if dim not in (-1, self.dim() - 1) or index.shape != (*self._numbers.shape, 1):
            return None
        return self._after(self._terms(index.reshape(-1))[1].to(self._part.dtype).view(index.shape))

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> CutOutput | None:
        names = (
            ("dim", "_stacklevel", "dtype")
            if func in (F.softmax, F.log_softmax)
            else ("dim", "dtype")
        )
        options = dict(zip(names, args, strict=False)) | kwargs
        if options.get("dim") not in (-1, self.dim() - 1):
            return None
        self._tell(Use(softmax_rows=self._rows.counts[self._rows.comm.rank]))
        part = self._wide() if options.get("dtype") is None else self._part.to(options["dtype"])
        logs = part - LogSum.apply(part, self._rows).unsqueeze(1)  # type: ignore[no-untyped-call]
        if options.get("dtype") is None and not torch.is_autocast_enabled(part.device.type):
            logs = logs.to(self._part.dtype)
        return self._like(part=logs if func.__name__ == "log_softmax" else logs.exp())

    @torch.no_grad()
    def _best(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The best class of each row, or the k best."""
        arguments = (
            dict(zip(("dim", "keepdim") if name == "argmax" else _TOPK, args, strict=False))
            | kwargs
        )
        dim, keepdim = (
            arguments.pop("dim", None if name == "argmax" else -1),
            arguments.pop("keepdim", False),
        )
        k = arguments.pop("k", 1)
        if (
            arguments.pop("sorted", True) is not True
            or arguments.pop("largest", True) is not True
            or arguments
        ):
            return None
        if dim not in (-1, self.dim() - 1):
            return None
        values, classes = best_of_rows(self._part, self._rows, self._widths, k)
        flat, shape = self._numbers.reshape(-1), (*self._numbers.shape, k)
        values, classes = values[flat].view(shape), classes[flat].view(shape)
        if name == "topk":
            return torch.return_types.topk((values, classes))
        return classes if keepdim else classes[..., 0]


def _view(func: Any, args: Any, kwargs: Any, number: int) -> _After:
    """Return a function for one of the views that a function gives."""

    def view(whole: Tensor) -> Tensor:
        viewed = func(whole, *args, **kwargs)
        one: Tensor = viewed[number] if isinstance(viewed, tuple) else viewed
        return one

    return view


def _is_view(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function gives a view, which may be changed in place."""
    leaves = pytree.tree_leaves((args, kwargs))
    return getattr(func, "__name__", "") in _VIEWS and not any(
        isinstance(leaf, Tensor) for leaf in leaves
    )


def _shares_memory(made: Any, whole: Tensor) -> bool:
    """Whether a function's first result is the whole, or a view of it."""
    made = made[0] if isinstance(made, tuple | list) and made else made
    return made is whole or (
        isinstance(made, Tensor)
        and made._base is not None
        and made._base is (whole if whole._base is None else whole._base)
    )


def _has_a_part(leaf: Any) -> bool:
    """Whether each rank would use a part of an argument, or get a part of its gradient."""
    return isinstance(leaf, Tensor) and (leaf.dim() > 0 or leaf.requires_grad)


def _whole(values: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.whole() if isinstance(leaf, CutOutput) else leaf, values
    )


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_DETACH = (Tensor.detach, torch.detach, _getter("data"))
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
_OF_THE_PART = frozenset(
    map(_getter, ("device", "requires_grad", "is_cuda", "layout", "is_leaf", "grad_fn"))
)
_ELEMENTWISE = frozenset(
    (
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "clone", "mul", "div"),
        *("true_divide", "add", "sub", "neg", "tanh", "clamp", "negative", "subtract", "multiply"),
        *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__neg__"),
        *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid"),
        *("softplus", "square", "hardtanh", "hardsigmoid", "hardswish", "softsign", "logsigmoid"),
    )
)
_IN_ORDER = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
_VIEWS = _IN_ORDER | frozenset(
    (
        *("__getitem__", "transpose", "permute", "narrow", "select", "chunk", "split", "unbind"),
        "movedim",
    )
)
