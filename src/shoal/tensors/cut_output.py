"""The output of a layer cut by its outputs: it looks like this rank's rows, but is not gathered.

Rank r has its own outputs of all ranks' rows. It stays cut in the usual functions of logits, and in
functions between two linear layers:

    casts, scaling, shifts, activations     change the part; dropout draws different numbers on
                                            every rank
    views, slices, picks of rows            change a tensor of row numbers; the cut dimension stays
                                            the last
    a linear layer cut by its inputs        takes the part as it is (strategies/pair.py)
    cross_entropy, nll_loss, logsumexp      peers are told a row's target, and return four sums;
    and gather of one output a row          four numbers go back; margins are written with the
                                            last two
    softmax, log_softmax                    each rank's two sums of all rows to every rank, and one
                                            number back
    argmax, topk                            the best of each rank's best

Any other function gathers the outputs of this rank's rows first. A change in place and a hook bind
the object to the whole: afterwards it and its views are ordinary tensors (`bound`). All of these
are collectives, but a rank may read values alone (output_call.py). Torch's loss_parallel does not
fit: it needs DTensors on a device mesh of processes, and parameters that are DTensors. Here
parameters stay the user's own objects, and ranks may be threads.

Reference: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross entropy).
Guarded by tests/equivalence/test_head.py and test_pair.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from shoal.core.errors import UsageError
from shoal.core.names import pins
from shoal.tensors.boundary import CallRows, shaped
from shoal.tensors.cut_functions import LogSum, RowTerms, best_of_rows, dropout
from shoal.tensors.cut_losses import LossArguments, RowValues
from shoal.tensors.functions_of_cut import (
    DETACH,
    ELEMENTWISE,
    IN_ORDER,
    OF_THE_PART,
    OF_THE_SHAPE,
    SEES,
    VIEWS,
    BestOf,
    RowViews,
    Use,
    has_a_part,
    is_view,
    shares_memory,
    view_of,
)
from shoal.tensors.ghost import check_native, ghost
from shoal.tensors.in_place_functions import HOOKS, is_change
from shoal.tensors.output_call import GATHERING, OutputCall, ReadsLocally, Recipe, Step

_After = Callable[[Tensor], Tensor]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@final
class CutOutput(Tensor):
    """This rank's rows of an output. In memory it has a part of all ranks' rows.

    The tensor itself takes no memory (tensors/ghost.py).
    """

    _part: Tensor  # (all ranks' rows, this rank's outputs)
    _rows: CallRows
    _widths: tuple[int, ...]  # the number of each rank's outputs
    _numbers: Tensor  # numbers of this rank's rows, in the shape of the leading dimensions
    # whether all rows are there, and views have changed only their shape; alike on every rank
    _in_order: bool
    _after: _After  # applied to every ordinary tensor that is made of it
    _tell: Callable[[Use], None]
    _bound: Tensor | None  # the whole, after a change in place or a hook has asked for it
    _viewed_from: CutOutput | None  # the output that this is a view of
    _viewed: _After  # makes this view of that output's whole
    _is_used: bool  # whether something was computed from it
    _call: OutputCall | None  # the call of the layer; None if ranks cannot read alone
    _recipe: Recipe  # functions that make it of the layer's output
    _is_alone: bool  # whether this rank was alone at the last reading

    @classmethod
    def of(
        cls,
        part: Tensor,
        rows: CallRows,
        widths: Sequence[int],
        numbers: Tensor,
        tell: Callable[[Use], None] = lambda use: None,
        call: OutputCall | None = None,
    ) -> CutOutput:
        """Make an output that has row `i` of this rank wherever `numbers` is i."""
        grad = part.requires_grad and torch.is_grad_enabled()
        like = ghost((*numbers.shape, sum(widths)), part.dtype, part.device, grad=grad)
        logits: CutOutput = like.as_subclass(cls)
        logits._part, logits._rows, logits._numbers = part, rows, numbers
        logits._widths, logits._after, logits._tell = tuple(widths), _as_it_is, tell
        logits._bound, logits._viewed_from, logits._viewed = None, None, _as_it_is
        logits._in_order, logits._is_used, logits._is_alone = True, False, False
        logits._call, logits._recipe = call, ()
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, CutOutput) and first.bound() is None:
            check_native(first)
            if func in OF_THE_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in OF_THE_PART:
                return func(first._part, *args[1:], **kwargs)
            rest = kwargs if args else {k: v for k, v in kwargs.items() if k != "input"}
            try:
                done = None if is_change(func) else first._cut(func, args[1:], rest)
            except ReadsLocally as local:
                given, named = _whole((tuple(args[1:]), rest))
                return func(first._local(local), *given, **named)
            if done is not None:
                first._note_use(done)
                return done
            if is_change(func):
                first.bind(func)
            elif (kwargs.get("inplace") or is_view(func, args[1:], kwargs)) and (
                values := first._bind_or_read()
            ) is not None:
                given, named = _whole((tuple(args[1:]), rest))
                return func(values, *given, **named)
        if isinstance(out := kwargs.get("out"), CutOutput):
            out.bind(func)
        with torch.set_grad_enabled(torch.is_grad_enabled() and func.__name__ not in SEES):
            given, named = _whole((tuple(args), kwargs))
        done = func(*given, **named)
        if isinstance(first, CutOutput) and given and shares_memory(done, given[0]):
            if first._bound is None and first._is_alone:
                return done
            if first._bound is not given[0]:  # a view of the whole may be changed in place
                first.bind(func)
                done = func(first._bound, *given[1:], **named)
            return first if done is first._bound else done
        return out if isinstance(out, CutOutput) else done

    def bound(self) -> Tensor | None:
        """Return the whole that this object, or the output it is a view of, was bound to."""
        if self._bound is None and self._viewed_from is not None:
            base = self._viewed_from.bound()
            self._bound = None if base is None else self._viewed(base)
        if self._bound is None and self._call is not None and self._call.whole_rows is not None:
            with torch.set_grad_enabled(self._part.requires_grad):
                self._bound = self._after(self._made_of(self._call.whole_rows))
        return self._bound

    def bind(self, func: Any) -> None:
        """Become the whole from now on, for a function that changes it or hooks into it.

        Raises:
            UsageError: a hook comes after a function, and could not see its gradient.
        """
        if self._is_used and func.__name__ in HOOKS:
            raise UsageError(
                f"{func.__name__} on an output that is cut over the ranks comes behind its use",
                do="call it before the output is used, or give parallelize "
                f"{pins([self._rows.layer], 'column')}: its output is whole",
            )
        values = self._bind_or_read()
        if values is not None and values.requires_grad:
            raise UsageError(
                f"one rank alone calls {func.__name__} on an output that is cut over the ranks",
                do="call it on every rank",
            )

    def _bind_or_read(self) -> Tensor | None:
        """Become the whole from now on. Return the values if this rank alone reads it, in training.

        Without a gradient it also becomes the whole if this rank is alone.
        """
        base = self
        while base._viewed_from is not None:
            base = base._viewed_from
        with torch.set_grad_enabled(torch.is_grad_enabled() or self._part.requires_grad):
            values = base.whole()
            if base._is_alone and values.requires_grad:
                return self._viewed_of(base, values)
        base._bound = values
        self.bound()
        return None

    def _viewed_of(self, base: CutOutput, values: Tensor) -> Tensor:
        """Return the values of this view, given the values of its base."""
        if self is base or self._viewed_from is None:
            return values
        return self._viewed(self._viewed_from._viewed_of(base, values))

    def _note_use(self, made: Any = None) -> None:
        """Note that something was computed from it, unless that is a view of it."""
        first = made[0] if isinstance(made, tuple) and made else made
        if isinstance(first, CutOutput) and (first is self or first._viewed_from is self):
            return
        used: CutOutput | None = self
        while used is not None:
            used._is_used, used = True, used._viewed_from

    def over(self, after: _After) -> Tensor:
        """Return the same output, and apply `after` to everything that is made of it."""
        if (bound := self.bound()) is not None:
            return after(bound)
        before = self._after
        return self._like(after=lambda t: after(before(t)))

    def taken_by(self, layer: str, widths: Sequence[int]) -> tuple[CallRows, Tensor] | None:
        """Return all ranks' rows and this rank's part of them, for a layer with inputs cut so."""
        if not self._in_order or tuple(widths) != self._widths or self._after is not _as_it_is:
            return None
        if self.bound() is not None:
            return None
        self._note_use()
        self._tell(Use(layer=layer))
        return self._rows, self._part

    def whole(self) -> Tensor:
        """Gather this rank's rows with all outputs."""
        if (bound := self.bound()) is not None:
            return bound
        self._tell(Use())
        purpose = self._purpose(GATHERING)
        scale = 1 / self._rows.comm.size
        try:
            rows = self._together(
                purpose,
                self._numbers.numel(),
                lambda _: self._rows.to_rows(self._part, self._widths, scale),
            )
        except ReadsLocally as local:
            return self._local(local)
        self._note_use()
        return self._after(self._shape(rows))

    def hold(self) -> None:
        """Keep this rank's part until the layer's next call, for ranks that read it alone."""
        if self._call is not None:
            self._call.hold()

    @property
    def _trains(self) -> bool:
        """Whether a gradient may come back through a reading."""
        return torch.is_grad_enabled() and self._part.requires_grad

    def _purpose(self, use: str) -> str:
        if self._call is None:
            return f"{use} of an output that is cut"
        return self._call.purpose(use, self._recipe)

    def _meet(self, number: int, purpose: str) -> list[int]:
        """Tell every rank a number before all read this output, and return theirs.

        Raises:
            ReadsLocally: this rank computes by itself.
        """
        if self._call is None:
            return self._rows.comm.numbers([number] * self._rows.comm.size, purpose)
        return self._call.meet(number, purpose, trains=self._trains)

    def _together(
        self,
        purpose: str,
        number: int,
        compute: Callable[[list[int]], Any],
        given: Sequence[Tensor] = (),
    ) -> Any:
        """Compute a result with all ranks, once they have told their numbers.

        Raises:
            ReadsLocally: this rank computes by itself.
        """
        call, self._is_alone = self._call if self._trains else None, False
        is_same = call is not None and not given and not self._recipe  # the same on every rank
        if call is not None and is_same and (noted := call.noted(purpose)) is not None:
            return noted
        try:
            numbers = self._meet(number, purpose)
        except ReadsLocally as local:
            noted = call.noted(purpose, given) if call is not None and local.is_alone else None
            if noted is None:
                raise
            return noted
        result = compute(numbers)
        if call is not None:
            call.note(purpose, given, result)
        return result

    def _local(self, local: ReadsLocally) -> Tensor:
        """Return the values that this rank computes by itself."""
        self._is_alone = local.is_alone
        values = self._made_of(local.rows)
        if local.is_alone:
            return values
        self._note_use()
        return self._after(values)

    def _made_of(self, rows: Tensor) -> Tensor:
        """Return the values of this output, given the values of the layer's output."""
        for step in self._recipe:
            rows = step.function(rows, *step.args, **step.kwargs)
        return self._shape(rows)

    def _shape(self, rows: Tensor) -> Tensor:
        shape = (*self._numbers.shape, sum(self._widths))
        return shaped(rows[self._numbers.reshape(-1)], shape)

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the function's result if that needs no gathering, else None."""
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
            return self._drop_out(*args, **kwargs)
        if func in DETACH:
            return self._like(part=self._part.detach())._seen_as(self, Tensor.detach)
        if name in ELEMENTWISE and not any(map(has_a_part, pytree.tree_leaves((args, kwargs)))):
            return self._with(func(self._part, *args, **kwargs), Step(func, args, kwargs))
        if name == "contiguous":
            return self
        if name in VIEWS:
            return self._view(func, name in IN_ORDER, args, kwargs)
        if name in ("argmax", "topk") and not (
            name == "topk" and torch.is_grad_enabled() and self._part.requires_grad
        ):
            return self._best(name, *args, **kwargs)
        return None

    def _with(self, part: Tensor, step: Step) -> CutOutput:
        """Return the output with another part; the same object if the part is the same."""
        return self if part is self._part else self._like(part=part, step=step)

    def _drop_out(self, *args: Any, **kwargs: Any) -> CutOutput:
        """Return the output after dropout. Its call is new, as no rank can compute it alone."""
        part = dropout(self._part, self._rows.comm.rank, *args, **kwargs)
        if part is self._part:
            return self
        like = self._like(part=part)
        if self._call is not None and self._rows.comm.attendance is not None:
            layer = f"{self._rows.layer}, dropout"
            like._call, like._recipe = OutputCall(part, self._rows, self._widths, layer), ()
        return like

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
        step: Step | None = None,
    ) -> CutOutput:
        """Return an output like this one, except for the given values."""
        like = CutOutput.of(
            self._part if part is None else part,
            self._rows,
            self._widths,
            self._numbers if numbers is None else numbers,
            self._tell,
            self._call,
        )
        like._recipe = self._recipe if step is None else (*self._recipe, step)
        like._after, like._in_order = after or self._after, in_order and self._in_order
        return like

    def _view(
        self, func: Any, in_order: bool, args: Any, kwargs: Any
    ) -> CutOutput | tuple[CutOutput, ...] | None:
        """Apply the function to row numbers; None if the class dimension would not stay last."""
        if func is Tensor.__getitem__ and isinstance(args[0], Tensor):
            if args[0].dim() > self._numbers.dim():
                return None
            return self._like(numbers=self._numbers[args[0]], in_order=False)
        views = RowViews.of(self._numbers, sum(self._widths), func, args, kwargs)
        if views is None:
            return None
        cut = tuple(self._like(numbers=each, in_order=in_order) for each in views.numbers)
        for number, part in enumerate(cut if views.share_memory else ()):
            part._seen_as(self, view_of(func, args, kwargs, number))
        return cut if views.are_several else cut[0]

    def _loss(
        self, arguments: LossArguments, *, of_log_probabilities: bool = False
    ) -> Tensor | None:
        """Return torch's cross_entropy, or nll_loss if this output has log probabilities."""
        if not arguments.are_of_classes(self._numbers.shape):
            return None
        classes = arguments.checked(sum(self._widths))
        part = self._wide()
        use = "nll_loss" if of_log_probabilities else "cross_entropy"
        log_sum, picked, summed = self._terms(use, classes.wanted, classes.smooth_weights(part))
        if of_log_probabilities:
            log_sum = torch.zeros_like(picked)
        return self._after(classes.loss(RowValues(log_sum, picked, summed), part, self._part.dtype))

    def _wide(self) -> Tensor:
        """Return the part in the type in which losses are computed."""
        is_narrow = self._part.dtype in (torch.float16, torch.bfloat16)
        return self._part.float() if is_narrow else self._part

    def _terms(
        self, use: str, wanted: Tensor, of_class: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's log Σ exp, its wanted output, and its sum with class weights."""
        self._tell(Use(loss_rows=len(wanted)))
        numbers = self._numbers.reshape(-1)
        some = "" if self._in_order else " of some rows"
        purpose = self._purpose(f"{use}{some}{'' if of_class is None else ', smooth'}")

        def compute(counts: list[int]) -> Any:
            picked = CallRows(self._rows.comm, tuple(counts), purpose)
            return RowTerms.apply(  # type: ignore[no-untyped-call]
                self._wide(), (self._rows, picked), self._widths, numbers, wanted, of_class
            )

        given = [numbers, wanted, *([] if of_class is None else [of_class])]
        terms: tuple[Tensor, Tensor, Tensor] = self._together(purpose, len(wanted), compute, given)
        return terms

    def _logsumexp(self, dim: Any, keepdim: bool = False) -> Tensor | None:
        if dim not in (-1, self.dim() - 1, (-1,), [-1]):
            return None
        of_row = self._terms("logsumexp", torch.zeros_like(self._numbers.reshape(-1)))[0].to(
            self._part.dtype
        )
        return self._after(of_row.view(*self._numbers.shape, *[1] * keepdim))

    def _gather(self, dim: int, index: Tensor) -> Tensor | None:
        if dim not in (-1, self.dim() - 1) or index.shape != (*self._numbers.shape, 1):
            return None
        picked = self._terms("gather", index.reshape(-1))[1]
        return self._after(picked.to(self._part.dtype).view(index.shape))

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> CutOutput | None:
        is_function = func in (F.softmax, F.log_softmax)
        names = ("dim", "_stacklevel", "dtype") if is_function else ("dim", "dtype")
        options = dict(zip(names, args, strict=False)) | kwargs
        if options.get("dim") not in (-1, self.dim() - 1):
            return None
        self._tell(Use(softmax_rows=self._rows.counts[self._rows.comm.rank]))
        part = self._wide() if options.get("dtype") is None else self._part.to(options["dtype"])
        log_sum = self._together(
            self._purpose(f"softmax in {part.dtype}"),
            len(part),
            lambda _: LogSum.apply(part, self._rows),  # type: ignore[no-untyped-call]
        )
        logs = part - log_sum.unsqueeze(1)
        if options.get("dtype") is None and not torch.is_autocast_enabled(part.device.type):
            logs = logs.to(self._part.dtype)
        is_log = func.__name__ == "log_softmax"
        softmax = F.log_softmax if is_log else F.softmax
        step = Step(softmax, (), {"dim": -1, "dtype": options.get("dtype")})
        return self._like(part=logs if is_log else logs.exp(), step=step)

    @torch.no_grad()
    def _best(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return each row's best class, or its k best."""
        asked = BestOf.asked(name, args, kwargs)
        if asked is None or asked.dim not in (-1, self.dim() - 1):
            return None
        self._meet(asked.k, self._purpose(f"best {asked.k}"))
        values, classes = best_of_rows(self._part, self._rows, self._widths, asked.k)
        flat, shape = self._numbers.reshape(-1), (*self._numbers.shape, asked.k)
        values, classes = values[flat].view(shape), classes[flat].view(shape)
        if name == "topk":
            return torch.return_types.topk((values, classes))
        return classes if asked.keepdim else classes[..., 0]


def _whole(values: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.whole() if isinstance(leaf, CutOutput) else leaf, values
    )
