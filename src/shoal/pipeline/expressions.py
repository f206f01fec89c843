"""Functions of a model's output, which are computed where the output is.

A script computes with its output as ever. Each function makes an expression: the function, its
arguments, and the forms of its results. A number is told at once, as a loss is. So are small
results that take no gradient, such as argmax. All else waits until it is used for one of these.

    logits[:, :-1]        an expression: nothing is sent
    cross_entropy(…, y)   a number: targets go to the end, which computes all of it for each rank's
                          rows, with that rank's own tensors and constants. Each rank gets a number

Every rank makes the same expressions, because every rank runs the same script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.pipeline.absent_tensors import Forms
from shoal.pipeline.memory import memory_of


@final
class Expression:
    """A function of outputs, and its results for each rank's rows where the end is.

    Args:
        forwards: the forwards of the outputs, each once.
        function: the function; None for the output of a forward itself.
        arguments: its arguments and those by name; an `EndResult` is in the place of each result
            of another expression.
        forms: forms of the results, if they are known.
    """

    def __init__(
        self,
        forwards: tuple[Any, ...],
        function: Callable[..., Any] | None,
        arguments: Any = ((), {}),
        forms: Sequence[Tensor] = (),
    ) -> None:
        self.forwards, self.function, self.forms = forwards, function, forms
        self.arguments: Any = pytree.tree_map(_keep, arguments)
        self.is_loss = False  # whether the function is the loss that parallelize was given
        self.modes = ThreadModes.now()
        self.number: int | None = None  # number of the computed expression
        self.of_ranks: dict[int, Sequence[Tensor]] = {}  # results at the end, for each rank's rows
        self.seen: dict[int, Tensor] = {}  # results that this rank has looked at
        self.told: dict[int, Tensor] = {}  # numbers of this rank's rows that it was told

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def is_computed(self) -> bool:
        """Whether the end has computed it."""
        return self.function is None or self.number is not None

    def computed(self, number: int) -> None:
        """Note that the end has computed it. If its results are numbers, forget its arguments.

        A rank that reads other results alone computes them once more.
        """
        self.number = number
        if not any(form.dim() for form in self.forms):
            self.function, self.arguments = None, ((), {})

    def compute(self, rank: int, args: Any, kwargs: Any) -> Any:
        """Compute it for a rank's rows, and return the function's results."""
        assert self.function is not None

        def value(leaf: Any) -> Any:
            if isinstance(leaf, EndResult):
                return leaf.expression.of_ranks[rank][leaf.number]
            return leaf

        args, kwargs = with_slices(pytree.tree_map(value, (args, kwargs), is_leaf=_is_ours))
        with self.modes.again():
            output = self.function(*args, **kwargs)
        self.of_ranks[rank] = [
            leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)
        ]
        return output


@final
class EndResult:
    """A result of an expression, by its number."""

    def __init__(self, expression: Expression, number: int) -> None:
        self.expression, self.number = expression, number


class SliceBounds(NamedTuple):
    """A slice, of which a tree has the bounds as leaves."""

    bounds: tuple[Any, Any, Any]


class _Constant:
    """The place of a number, which ranks may have unlike."""


def _is_ours(leaf: Any) -> bool:
    return isinstance(leaf, SliceBounds)


def _keep(leaf: Any) -> Any:
    """Return a tensor as it is now: the script may change it before it is used."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def sliced(values: Any) -> Any:
    """Return values with the bounds of slices in the places of slices."""
    return pytree.tree_map(
        lambda leaf: (
            SliceBounds((leaf.start, leaf.stop, leaf.step)) if isinstance(leaf, slice) else leaf
        ),
        values,
    )


def with_slices(values: Any) -> Any:
    """Return values with slices in the places of their bounds."""
    return pytree.tree_map(
        lambda leaf: slice(*leaf.bounds) if isinstance(leaf, SliceBounds) else leaf,
        values,
        is_leaf=_is_ours,
    )


def in_order(last: Sequence[Expression]) -> list[Expression]:
    """Return expressions behind all that they are made of, but for computed ones."""
    found: dict[Expression, None] = {}
    for expression in last:
        _follow(expression, found)
    return list(found)


def _follow(expression: Expression, found: dict[Expression, None]) -> None:
    if expression.is_computed or expression in found:
        return
    for leaf in pytree.tree_leaves(expression.arguments):
        if isinstance(leaf, EndResult):
            _follow(leaf.expression, found)
    found[expression] = None


def described(expressions: Sequence[Expression], results: Sequence[EndResult]) -> str:
    """Return the functions, and which results each takes and which are told.

    It is the same text on every rank.
    """
    numbers = {expression: number for number, expression in enumerate(expressions)}
    forwards: dict[Any, int] = {}

    def of(result: EndResult) -> str:
        if (number := numbers.get(result.expression)) is not None:
            return f"{expressions[number].name} {number}.{result.number}"
        forward = result.expression.forwards[0]
        of_forward = forwards.setdefault(forward, len(forwards))
        if result.expression.number is None:
            return f"output {of_forward}.{result.number}"
        return f"value {of_forward}.{result.expression.number}.{result.number}"

    texts = []
    for expression in expressions:
        leaves = pytree.tree_leaves(expression.arguments)
        taken = [of(leaf) for leaf in leaves if isinstance(leaf, EndResult)]
        texts.append(f"{expression.name}({', '.join(taken)})")
    return ", ".join([*texts, *map(of, results)])


def without_constants(values: Any, device: torch.device) -> tuple[Any, Tensor | None]:
    """Return values without their numbers, and a tensor of these if there are any."""
    numbers: list[float] = []

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, bool) or not isinstance(leaf, int | float) or not _is_exact(leaf):
            return leaf
        numbers.append(leaf)
        return INTEGER if isinstance(leaf, int) else REAL

    placed_values = pytree.tree_map(placed, values)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device) if numbers else None
    return placed_values, tensor


def with_constants(values: Any, numbers: Tensor | None) -> Any:
    """Return values with their numbers again."""
    given = iter([] if numbers is None else numbers.tolist())

    def number(leaf: Any) -> Any:
        if isinstance(leaf, _Constant):
            return int(next(given)) if leaf is INTEGER else next(given)
        return leaf

    return pytree.tree_map(number, values)


def _is_exact(number: float) -> bool:
    return isinstance(number, float) or abs(number) <= 2**53


INTEGER, REAL = _Constant(), _Constant()


@dataclass(frozen=True)
class ThreadModes:
    """Settings of a thread that change a function's results."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> ThreadModes:
        """Return the settings of this thread."""
        kinds = ("cpu", "cuda")
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
        return cls(torch.is_grad_enabled(), autocast)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute under these settings."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled != torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield


def forms_of(forms: Forms, function: Callable[..., Any], arguments: Any) -> Any:
    """Return a function's results, with forms in the places of tensors.

    Raises:
        Unclear: it draws random numbers, or its forms depend on values.
        Changing: it changes a result of another expression in place.
    """
    results = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, EndResult)]
    watch = _WatchedOps({memory_of(leaf.expression.forms[leaf.number]) for leaf in results})
    if function is Tensor.__getitem__:
        arguments = _without_masks(*arguments[0]), {}

    def formed(leaf: Any) -> Any:
        if isinstance(leaf, EndResult):
            return leaf.expression.forms[leaf.number]
        if isinstance(leaf, SliceBounds):
            return slice(*leaf.bounds)
        return forms.form(leaf) if isinstance(leaf, Tensor) else leaf

    args, kwargs = pytree.tree_map(formed, arguments, is_leaf=_is_ours)
    try:
        with forms.mode, watch, torch.no_grad():
            output = function(*args, **kwargs)
    except Exception as error:  # the function itself will say it, of values
        raise Unclear from error
    if watch.changes:
        raise Changing
    if watch.draws:
        raise Unclear
    return output


def _without_masks(values: Any, index: Any) -> tuple[Any, Any]:
    """Return arguments of an index without masks: the form is that of the rows that are left."""
    parts: list[Any] = []
    is_tuple = isinstance(index, tuple) and not isinstance(index, SliceBounds)
    for part in index if is_tuple else (index,):
        is_mask = isinstance(part, Tensor) and part.dtype == torch.bool
        parts += part.nonzero(as_tuple=True) if is_mask else [part]
    return values, tuple(parts)


class Unclear(Exception):
    """A function that a rank computes by itself, of values that it has looked at."""


class Changing(Exception):
    """A function that changes in place."""


@final
class _WatchedOps(TorchDispatchMode):
    """Sees whether random numbers are drawn, and whether some memory changes.

    Args:
        memory: the memory, as `memory_of` tells it.
    """

    def __init__(self, memory: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self.draws, self.changes = memory, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable:
            written = [
                arg
                for arg, of in zip(args, func._schema.arguments, strict=False)
                if isinstance(arg, Tensor) and of.alias_info is not None and of.alias_info.is_write
            ]
            self.changes = self.changes or not self._memory.isdisjoint(map(memory_of, written))
        return func(*args, **(kwargs or {}))
