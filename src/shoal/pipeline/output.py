"""The output of a model in a pipeline: the rank that holds the end has it.

Functions of it are expressions, which the end computes. `loss_fn` takes it as it is. Shapes cost
nothing. Whoever looks at its values gets them, without a gradient: all ranks look together, or one
alone (alone_output.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, final

import torch
from torch import Tensor

from shoal.core.errors import UsageError
from shoal.pipeline.expressions import Changing, EndResult, Expression, Unclear, sliced
from shoal.pipeline.memory import changes_in_place, memory_of
from shoal.pipeline.trees import mapped, tensors_in
from shoal.tensors.ghost import check_native, ghost
from shoal.tensors.in_place_functions import HOOKS, is_change

_After = Callable[[Tensor], Tensor]


@final
class EndOutput(Tensor):
    """A tensor of the output, or a function of it, which is at the end of the pipeline.

    Args:
        expression: computes it.
        number: its number among the expression's results.
        form: its form.
        takes_grad: whether it takes a gradient.
        after: brings its gradient back the way the output came.
    """

    expression: Expression
    number: int
    _form: Tensor
    _takes_grad: bool
    after: _After | None
    _view_of: Any  # function and arguments of a view
    _bound: Tensor | None  # the values, once a change in place or a hook has asked for them
    _viewed_from: Any  # the output of which this is a view, and the function that makes it
    _is_used: bool  # something was made of it

    @classmethod
    def of(
        cls,
        expression: Expression,
        number: int,
        form: Tensor,
        *,
        takes_grad: bool,
        after: _After | None = None,
    ) -> EndOutput:
        """Return a tensor of an output."""
        grad = takes_grad and torch.is_grad_enabled()
        like = ghost(form.shape, form.dtype, torch.device("cpu"), grad=grad)
        output = like.as_subclass(cls)
        output.expression, output.number, output._form = expression, number, form
        output._takes_grad, output.after, output._view_of = takes_grad, after, None
        output._bound, output._viewed_from, output._is_used = None, None, False
        return output

    @property
    def forward(self) -> Any:
        """The forward of which this is the output; the first of several."""
        return self.expression.forwards[0]

    @property
    def result(self) -> EndResult:
        """Its place among the results of its expression."""
        return EndResult(self.expression, self.number)

    @property
    def form(self) -> Tensor:
        """Its form."""
        return self._form

    def over(self, after: _After) -> EndOutput:
        """Return the same output, with gradients that come back through `after`."""
        before = self.after
        return EndOutput.of(
            self.expression,
            self.number,
            self._form,
            takes_grad=self._takes_grad,
            after=after if before is None else lambda tensor: after(before(tensor)),
        )

    @property
    def takes_grad(self) -> bool:
        """Whether a function of it takes a gradient now."""
        return self._takes_grad and torch.is_grad_enabled()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, EndOutput) and first.bound() is None:
            check_native(first)
            if func == _REQUIRES_GRAD:
                return first._takes_grad
            if func == _GRAD_FN:
                return None
            if func in _OF_FORM:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(first._form, *args[1:], **kwargs)
            if is_change(func):
                return _change(func, first, args, kwargs)
        if any(
            isinstance(leaf, EndOutput) and leaf.bound() is not None
            for leaf in tensors_in((args, kwargs))
        ):
            args, kwargs = mapped(as_bound, (tuple(args), kwargs))
            done = func(*args, **kwargs)
            return first if isinstance(first, EndOutput) and done is first._bound else done
        if name not in _LOOKS and not changes_in_place(func) and kwargs.get("out") is None:
            try:
                return _express(func, args, kwargs)
            except Unclear:
                pass
            except Changing:
                return _change(func, first, args, kwargs)
        look = _seen if name in _SEES else looked
        args, kwargs = mapped(look, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def look(self) -> Tensor:
        """Return the values (a collective); their gradient goes back to the end."""
        if (bound := self.bound()) is not None:
            return bound
        if not self.takes_grad:
            return self.seen()
        note_use([self])
        told: Tensor = self.forward.told([self])[0]
        return told

    def bound(self) -> Tensor | None:
        """Return the values to which this object, or its base, was bound; or None."""
        if self._bound is None and self._viewed_from is not None:
            base, view = self._viewed_from
            values = base.bound()
            self._bound = None if values is None else view(values)
        return self._bound

    def bind(self) -> Tensor:
        """Be the values from here on: something changes them in place, or hooks into them."""
        base = self
        while base._viewed_from is not None:
            base, _ = base._viewed_from
        values = base.look()
        if base.forward.is_alone:
            raise UsageError(
                "one rank alone changes the output of a pipeline in place, or hooks into it",
                do="do it on every rank",
            )
        base._bound = values
        bound = self.bound()
        assert bound is not None
        return bound

    def seen(self) -> Tensor:
        """Return the values without a gradient (a collective, once)."""
        if self.number not in self.expression.seen:
            if any(each.is_seen for each in self._bases()):
                return self.in_memory()
            with torch.no_grad():
                values: Tensor = self.forward.told([self])[0]
            if self.forward.is_alone:  # what all ranks read later, this one reads with them
                return values
            self.expression.seen[self.number] = values
        return self.expression.seen[self.number]

    @property
    def is_seen(self) -> bool:
        """Whether this rank has the values, or has them of a tensor of which this is a view."""
        return self.number in self.expression.seen or any(each.is_seen for each in self._bases())

    def in_memory(self) -> Tensor:
        """Return the values. A view shares memory with its base."""
        if self._view_of is not None:
            func, arguments = self._view_of
            args, kwargs = mapped(
                lambda leaf: leaf.in_memory() if isinstance(leaf, EndOutput) else leaf, arguments
            )
            with torch.no_grad():
                made = tensors_in(func(*args, **kwargs))[self.number]
            self._view_of, self.expression.seen[self.number] = None, made
        values = self.expression.seen[self.number] = self.seen()
        return values

    def _bases(self) -> list[EndOutput]:
        given = tensors_in(self._view_of[1]) if self._view_of is not None else []
        return [leaf for leaf in given if isinstance(leaf, EndOutput)]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EndOutput({tuple(self._form.shape)}, {self._form.dtype})"


def looked(leaf: Any) -> Any:
    """Return a value, of an output, its values for this rank."""
    return leaf.look() if isinstance(leaf, EndOutput) else leaf


def _seen(leaf: Any) -> Any:
    return leaf.seen() if isinstance(leaf, EndOutput) else leaf


def as_bound(leaf: Any) -> Any:
    """Return a value, of an output that is bound to its values these."""
    bound = leaf.bound() if isinstance(leaf, EndOutput) else None
    return leaf if bound is None else bound


def _change(func: Any, first: Any, args: Any, kwargs: Any) -> Any:
    """Change an output in place, or hook into it."""
    if not isinstance(first, EndOutput):
        args, kwargs = mapped(_bound_now, (tuple(args), kwargs))
        return func(*args, **kwargs)
    args, kwargs = mapped(looked, (tuple(args[1:]), kwargs))
    if first._takes_grad:
        if first._is_used and func.__name__ in HOOKS:
            raise UsageError(
                f"{func.__name__} on the output of a pipeline comes behind its use",
                do="call it before the output is used",
            )
        values = _bound_now(first)
        done = func(values, *args, **kwargs)
        return first if done is values else done
    with torch.no_grad():
        func(first.in_memory(), *args, **kwargs)
    return first


def _bound_now(leaf: Any) -> Any:
    if not isinstance(leaf, EndOutput):
        return leaf
    with torch.enable_grad():
        return leaf.bind()


def note_use(given: Sequence[EndOutput]) -> None:
    """Note that something was made of these outputs, which a later hook would not see."""
    for each in given:
        used: Any = each
        while used is not None:
            used._is_used = True
            used = used._viewed_from[0] if used._viewed_from else None


def _view(func: Any, arguments: Any, base: EndOutput, number: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a view of the values of a base."""

    def view(values: Tensor) -> Tensor:
        args, kwargs = mapped(lambda leaf: values if leaf is base else leaf, arguments)
        made: Tensor = tensors_in(func(*args, **kwargs))[number]
        return made

    return view


def _express(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a function's results as expressions, numbers and small results told.

    Raises:
        Unclear: this rank computes it by itself, of values that it has looked at.
    """
    arguments = mapped(_as_seen, (tuple(args), kwargs))
    given = [leaf for leaf in tensors_in(arguments) if isinstance(leaf, EndOutput)]
    if not given:
        return func(*arguments[0], **arguments[1])
    expression = made_of(given, func, sliced(arguments))
    form = given[0].forward.forms_of(func, expression.arguments)
    forms = tensors_in(form)
    if not forms:  # a property of the form, such as its strides
        return form
    expression.forms = forms
    grad = any(each.takes_grad for each in given) and func not in _DETACH
    after = way_back(given)
    made = [
        EndOutput.of(
            expression,
            number,
            its_form,
            takes_grad=grad and its_form.is_floating_point(),
            after=after,
        )
        for number, its_form in enumerate(forms)
    ]
    name = getattr(func, "__name__", "")
    at_once = [not each.form.dim() or (not each._takes_grad and name in _SMALL) for each in made]
    _note_views(made, given, func, arguments)
    if not any(each._takes_grad for each in made):
        later = name in _LATER or all(each._view_of is not None for each in made)
        if not later and not all(at_once):
            raise Unclear
    wanted = list(compress(made, at_once))
    told = iter(given[0].forward.told(wanted) if wanted else ())
    results = iter([next(told) if now else each for each, now in zip(made, at_once, strict=True)])
    return mapped(lambda leaf: next(results) if isinstance(leaf, Tensor) else leaf, form)


def _note_views(
    made: Sequence[EndOutput], given: Sequence[EndOutput], func: Any, arguments: Any
) -> None:
    """Note which results of a function share memory with an output."""
    memory = {memory_of(leaf.form) for leaf in given}
    views = [(n, each) for n, each in enumerate(made) if memory_of(each.form) in memory]
    if not any(each._takes_grad for each in made):
        for _, each in views:
            each._view_of = (func, arguments)
        return
    for number, each in views if len(given) == 1 else ():
        each._viewed_from = given[0], _view(func, arguments, given[0], number)
    if any(each._viewed_from is None for each in made):
        note_use(given)


def made_of(
    given: Sequence[EndOutput], function: Any, arguments: Any, *, is_loss: bool = False
) -> Expression:
    """Return the expression of a function of outputs.

    Raises:
        Unclear: the outputs are of several models, or something else takes a gradient.
    """
    forwards = tuple(dict.fromkeys(f for each in given for f in each.expression.forwards))
    forwards[0].check_together(forwards)

    def named(leaf: Any) -> Any:
        if isinstance(leaf, EndOutput):
            return leaf.result
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            results = (forward.result(leaf) for forward in forwards)
            return next((each for each in results if each is not None), leaf)
        return leaf

    arguments = mapped(named, arguments)
    others = [leaf for leaf in tensors_in(arguments) if leaf.requires_grad]
    if others and torch.is_grad_enabled():
        raise Unclear
    expression = Expression(forwards, function, arguments)
    expression.is_loss = is_loss
    forwards[0].check_told(expression)
    return expression


def way_back(given: Sequence[EndOutput]) -> _After | None:
    """Return the way back of the gradient of these outputs."""
    return next((each.after for each in given if each.after is not None), None)


def _as_seen(leaf: Any) -> Any:
    """Return values that this rank has looked at; with gradients the output itself."""
    if not isinstance(leaf, EndOutput) or leaf.takes_grad:
        return leaf
    return leaf.expression.seen.get(leaf.number, leaf)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_REQUIRES_GRAD, _GRAD_FN = _getter("requires_grad"), _getter("grad_fn")
_DETACH = (Tensor.detach, _getter("data"))
# functions that are computed at once if nothing of them takes a gradient: results are small
_SMALL = frozenset(
    (
        *("argmax", "argmin", "topk", "max", "min", "amax", "amin", "sum", "mean", "any", "all"),
        *("cross_entropy", "nll_loss", "gather", "logsumexp", "norm", "std", "var"),
    )
)
# functions that wait for one of these, beside views; all others are computed of the values
_LATER = frozenset(
    (
        *("softmax", "log_softmax", "sigmoid", "logsigmoid", "round", "float", "double", "half"),
        *("to", "type", "bfloat16", "contiguous", "reshape", "flatten", "clone", "__getitem__"),
        *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__"),
        *("__ge__", "index_select", "squeeze", "detach"),
    )
)
# functions that look at values, of which nothing takes a gradient
_SEES = frozenset(
    (
        *("numpy", "tolist", "item", "data_ptr", "storage", "untyped_storage", "__array__"),
        *("__dlpack__", "__reduce_ex__", "__contains__", "__repr__", "__format__"),
    )
)
# functions that a rank computes by itself, of the values
_LOOKS = _SEES | {"cpu", "backward", "__deepcopy__", "grad"}
_OF_FORM = frozenset(
    [
        *(_getter(name) for name in ("shape", "dtype", "device", "ndim", "layout")),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.__len__,
    ]
)
