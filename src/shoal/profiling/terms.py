"""What a row is, and whether a loss is a mean or a sum over rows: seen on the sample.

    sum or mean   the loss of some rows, of the same rows twice, and three times: L, 2L, 3L of a
                  sum; L, L, L of a mean; anything else is taken for a mean
    terms         those of the target: its first dimension, and each further one along which the
                  loss is a mean, too (tokens of a text)
    where         in training the number is to be known as early as can be. The first of these
                  places that has it on every rank's sample: the first tensor of the input; the
                  output; any other tensor, or list, of the input; the target, at the loss

Where one function computes the loss of the whole batch, only the batch shows terms: the rows of its
target, where it is a pair, else what the loss is a mean or a sum over.

A loss that is a sum of rows and of something else than rows is neither, and is refused. Costs a few
calls of the loss on at most eight rows; of a model that returns its own loss, of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite, prod
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.batch import DEPTH, OPAQUE, mapped, tensors_of
from shoal.contracts.sample import LossFn, Sample, arguments, describe
from shoal.core.errors import SampleError, UsageError
from shoal.core.terms import INPUT, OUTPUT, TARGET, Terms

_FEW = 8  # rows that a loss is tried on
_SMALL_BYTES = 16 << 20  # an output of which a copy is kept
_NEAR = 1e-3  # of two losses that should be the same
_OF_MODULES = frozenset(vars(nn.Module()))
_LENGTH = "#"  # in a path: of the list there
_MEAN, _SUM, _NEITHER, _UNKNOWN = "mean", "sum", "neither", "unknown"
_COUNT = (
    "say how many terms the loss of a batch is a mean over: "
    "parallelize(…, compute_loss=f, count=lambda batch: len(batch[0]))"
)

_Path = tuple[int | str, ...]
_Size = tuple[int, ...]
_LossOf = Callable[[Sequence[int]], float]  # of these rows


@dataclass(frozen=True)
class _BatchItem:
    """A tensor or list in a batch: the way to it, and its size."""

    path: _Path
    size: _Size

    @property
    def terms(self) -> tuple[Terms, ...]:
        """What it counts, the likelier first."""
        rows = Terms(INPUT, self.path)
        # a table of one row, as of a text that is packed: its columns are what others call rows
        is_one_text = len(self.size) == 2 and self.size[0] == 1
        return (replace(rows, dims=(0, 1)), rows) if is_one_text else (rows,)


@dataclass(frozen=True)
class SampleTerms:
    """Places in the sample of one rank where terms of the loss can be counted."""

    kind: str  # of the loss
    places: tuple[Terms, ...]  # where the terms can be counted
    kept: bool = False  # modules keep tensors with a history


@final
class Outputs:
    """A copy of what a model has put out, where that is small, so that it need not run again."""

    def __init__(self) -> None:
        self.copy: Any = None

    def kept_of(self, sample: Sample) -> Sample:
        """The same sample, whose loss function copies what it is given."""
        loss_fn = sample.loss_fn
        if loss_fn is None:
            return sample

        def keeping(output: Any, y: Any) -> Tensor:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.copy = _copied(output)
            return loss_fn(output, y)

        return replace(sample, loss_fn=keeping)


def _copied(output: Any) -> Any:
    """The same without a history; None where it is large, or of other things than tensors."""
    leaves = pytree.tree_leaves(output)
    if not all(type(leaf) is Tensor and leaf.layout is torch.strided for leaf in leaves):
        return None
    if sum(leaf.nbytes for leaf in leaves) > _SMALL_BYTES:
        return None
    return pytree.tree_map(lambda leaf: leaf.detach().clone(), output)


def seen(sample: Sample, counted: bool = False, outputs: Outputs | None = None) -> SampleTerms:
    """What this rank's sample shows, after a step. Runs the model and the loss some times more.

    Nothing need be seen of a `compute_loss` whose terms are `counted`.
    """
    kept = any(
        tensor.grad_fn is not None
        for module in sample.model.modules()
        for value in kept_by(module).values()
        for tensor in tensors_of(value)
    )
    with torch.no_grad():
        if sample.loss_fn is not None:
            found = _of_loss(sample, sample.loss_fn, outputs and outputs.copy)
        elif counted and sample.compute_loss is not None:
            found = SampleTerms(_UNKNOWN, (Terms(),))
        else:
            found = _of_whole_loss(sample)
    return replace(found, kept=kept)


def kept_by(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that may hold what it has computed."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Tensor | list | tuple | dict) and name not in _OF_MODULES
    }


def keep(module: nn.Module, name: str, value: Any) -> None:
    """Put another value into an attribute; a list or dict, which others may have, changes."""
    before = vars(module)[name]
    if value is before:
        return
    if isinstance(before, list):
        before[:] = value
    elif isinstance(before, dict):
        before.update(value)
    else:
        vars(module)[name] = value


def agreed_terms(ranks: Sequence[SampleTerms], of_batch: bool = False) -> Terms:
    """What every rank's sample shows, the same for all.

    `of_batch` says that nothing but the whole batch is there to count.

    Raises:
        SampleError: the loss is a sum over rows and of something else.
    """
    kinds = {rank.kind for rank in ranks}
    if _NEITHER in kinds:
        raise SampleError(
            "the loss is a sum over rows, and of something that does not grow with rows",
            do="let the loss be the sum alone, and add the rest to what it returns; or give a mean "
            "over rows",
        )
    common = [place for place in ranks[0].places if all(place in rank.places for rank in ranks)]
    first = [place for place in common if place.source == INPUT and not place.path]
    by_output = [place for place in common if place.source == OUTPUT]
    elsewhere = [place for place in common if place.source == INPUT and place.path]
    in_order = [*first, *by_output, *elsewhere] if len(first) == 1 else []
    chosen = next(iter([*in_order, *by_output, *elsewhere, *first]), Terms(TARGET))
    if of_batch and chosen.source == TARGET:
        raise SampleError(
            "the ranks' samples have their rows in different places of the batch",
            got="; ".join(f"rank {rank}: {each.places[0].path}" for rank, each in enumerate(ranks)),
            do=_COUNT,
        )
    summed = _SUM in kinds and _MEAN not in kinds
    return replace(chosen, summed=summed, kept=any(rank.kept for rank in ranks))


def count_of(terms: Terms, value: Any) -> float:
    """The terms that a batch has, of the inputs, output or target that `terms` names.

    Raises:
        UsageError: it is not of the sample's form.
    """
    size = _size_at(value, terms.path) if terms.path else next(_sizes(value), ((), (1,)))[1]
    if size is None or (terms.path and len(size) <= max(terms.dims)):
        raise UsageError(
            f"the {terms.source} is not of the form that it had in the sample, so this rank's rows "
            "cannot be counted",
            got=f"nothing of {1 + max(terms.dims)} dimensions at {list(terms.path)}",
            do="call the model as the sample does, or say what the loss is a mean over: "
            "parallelize(…, count=lambda output, y: len(y)), or count=lambda batch: … with a "
            "compute_loss",
        )
    return float(prod(size[dim] for dim in terms.dims if dim < len(size)))


def _of_loss(sample: Sample, loss_fn: LossFn, output: Any = None) -> SampleTerms:
    if output is None:
        with torch.enable_grad():  # as in training: some models look (checkpointing)
            output = pytree.tree_map(_detached, sample.output())
    else:
        sample.renew()
    y = sample.y
    target = next(_sizes(y), None)
    if target is None or not target[1][0]:
        return SampleTerms(_UNKNOWN, (Terms(),))
    number = target[1][0]

    def loss_of(rows: Sequence[int]) -> float:
        return float(loss_fn(_picked(output, number, rows), _picked(y, number, rows)))

    kind = _kind(loss_of, min(number, _FEW))
    dims = [0]
    if kind == _MEAN and isinstance(output, Tensor) and isinstance(y, Tensor):
        dims += _mean_along(loss_fn, output, y)
    counted = [dims]
    if len(dims) > 1 and len(dims) == len(target[1]) and y.is_floating_point():
        counted.append(dims[:-1])  # the last are features, of any number
    sources = {
        INPUT: list(_sizes(arguments(sample.model, sample.x))),
        OUTPUT: list(_sizes(output))[:1],
    }
    return SampleTerms(
        kind, tuple(_places(sources, [[target[1][d] for d in each] for each in counted]))
    )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _of_whole_loss(sample: Sample) -> SampleTerms:
    """Of a function of the whole batch, which alone tells the terms."""
    model = sample.model
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # no dropout, and no statistics

    def loss_by(place: _BatchItem) -> _LossOf:
        number = place.size[0]

        def loss_of(rows: Sequence[int]) -> float:
            sample.renew()
            by_parts = sample.compute_loss is not None and place.path[:1] != (_LENGTH,)
            picked = _picked_of_parts if by_parts else _picked
            with torch.enable_grad():  # by which the loss in a tuple is known
                return float(sample.loss_of(picked(sample.x, number, rows)).detach())

        return loss_of

    try:
        if sample.compute_loss is not None:
            return _of_batch(sample.x, loss_by)
        place = _BatchItem((), next(_sizes(arguments(model, sample.x)), ((), (0,)))[1])
        return SampleTerms(_kind(loss_by(place), min(place.size[0], _FEW)), place.terms)
    finally:
        sample.renew()
        for module, mode in modes:
            module.training = mode


def _of_batch(batch: Any, loss_by: Callable[[_BatchItem], _LossOf]) -> SampleTerms:
    """Where a batch has its rows, and what the loss is of them."""
    places = [_BatchItem(path, size) for path, size in _sizes_of_batch(batch)]
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    targets = [place for place in places if is_pair and place.path[:1] == (1,)][:1]
    by_number: dict[int, _BatchItem] = {}
    for place in targets or places:
        by_number.setdefault(place.size[0], place)
    if is_pair and _has_objects(batch[1]):
        by_number.clear()  # what is inside one of them is no row
    kinds = {n: _kind(loss_by(place), min(n, _FEW)) for n, place in by_number.items()}
    shown = [number for number, kind in kinds.items() if kind != _UNKNOWN]
    if not shown and not _is_plain(batch, by_number, places[:1] if targets else []):
        raise SampleError(
            "nobody can tell how many rows the batch has",
            got=f"batch = {describe(batch)}",
            expected="tensors that have as many rows, over which the loss is a mean or a sum",
            do=_COUNT,
        )

    def likely(number: int) -> tuple[bool, bool, bool, int]:
        """Its rows matter; there are several; it is a list of them; many tensors have as many."""
        place = by_number[number]
        matters = len(shown) > 1 and _matters(loss_by(place), min(number, _FEW))
        of_list = place.path == (_LENGTH,)
        return matters, number > 1, of_list, sum(each.size[0] == number for each in places)

    number = max(shown or kinds, key=likely)
    same = [place for place in (*places[:1], by_number[number]) if place.size[0] == number]
    return SampleTerms(kinds[number], tuple(terms for place in same for terms in place.terms))


def _matters(loss_of: _LossOf, number: int) -> bool:
    """Whether the loss of some rows is another than that of all: they are no mere settings."""
    return number > 1 and not _near(loss_of(range(number // 2)), loss_of(range(number)))


def _has_objects(value: Any) -> bool:
    """Whether it is a tuple of what is not tensors, such as a dict for each picture."""
    return isinstance(value, tuple) and not all(isinstance(item, Tensor) for item in value)


def _kind(loss_of: _LossOf, number: int) -> str:
    """What a loss is of rows, by those of the first ones once, twice and three times.

    It is asked there and back, so that what grows from call to call (an annealed term) cancels out.
    """
    rows = list(range(number))
    try:
        first, second, thrice, fourth, last = (loss_of(rows * times) for times in (1, 2, 3, 2, 1))
    except Exception:  # it takes no rows but its own, or none that come twice
        return _UNKNOWN
    once, twice = (first + last) / 2, (second + fourth) / 2
    if not (isfinite(once) and once):
        return _UNKNOWN
    if _near(twice, once) and _near(thrice, once):
        return _MEAN
    if _near(twice, 2 * once) and _near(thrice, 3 * once):
        return _SUM
    more, still_more = twice - once, thrice - twice
    grows = abs(more) > _NEAR * abs(once) and abs(more - still_more) <= _NEAR * abs(more)
    return _NEITHER if grows and first == last else _UNKNOWN


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _NEAR * max(abs(a), abs(b))


def _mean_along(loss_fn: LossFn, output: Tensor, y: Tensor) -> list[int]:
    """The target's further dimensions along which the loss is a mean."""
    along = _matching(output.shape, y.shape)
    if along is None:
        return []
    output, y = output[:_FEW], y[:_FEW]
    try:
        whole = float(loss_fn(output, y))
        return [
            dim
            for dim in range(1, y.dim())
            if _near(
                float(loss_fn(torch.cat([output] * 2, along[dim]), torch.cat([y] * 2, dim))), whole
            )
        ]
    except Exception:  # the loss knows the size
        return []


def _matching(output: _Size, target: _Size) -> list[int] | None:
    """Which of an output's dimensions are those of the target: beside one of classes, or all."""
    if output == target or output[:-1] == target:
        return list(range(len(target)))
    if len(output) == 1 + len(target) and (output[:1] + output[2:]) == target:
        return [0, *range(2, len(output))]
    return None


def _places(
    sources: Mapping[str, Sequence[tuple[_Path, _Size]]], wanted: Sequence[Sequence[int]]
) -> Iterator[Terms]:
    """Where as many terms can be counted, by dimensions of these sizes or of their product."""
    for source, sizes in sources.items():
        for index, (path, size) in enumerate(sizes):
            for parts in wanted:
                found = _dims_of(size, parts)
                yield from (Terms(source, path if index else (), dims) for dims in found)
                if found:
                    break


def _dims_of(size: _Size, parts: Sequence[int]) -> list[tuple[int, ...]]:
    """The dimensions of these sizes in this order, else those of the same product."""
    numbers = range(len(size))
    same = [
        dims
        for dims in combinations(numbers, len(parts))
        if [size[dim] for dim in dims] == list(parts)
    ]
    if same or prod(parts) <= 1:
        return same
    return [
        dims
        for count in range(1, len(size) + 1)
        for dims in combinations(numbers, count)
        if prod(size[dim] for dim in dims) == prod(parts)
    ]


def _picked(value: Any, number: int, rows: Sequence[int]) -> Any:
    """The same with these rows of everything that has so many."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return [leaf[row] for row in rows] if len(leaf) == number else leaf
        if leaf.dim() and len(leaf) == number:
            return leaf[torch.tensor(rows, device=leaf.device)]
        return leaf

    return mapped(value, pick, (list, Tensor))


def _picked_of_parts(batch: Any, number: int, rows: Sequence[int]) -> Any:
    """The same of a whole batch, which may be a list of its parts: [x, y]."""
    if isinstance(batch, list):
        return [_picked(part, number, rows) for part in batch]
    return _picked(batch, number, rows)


def _sizes(value: Any, path: _Path = (), depth: int = DEPTH) -> Iterator[tuple[_Path, _Size]]:
    """The size of every tensor that has one, and the length of every list, in order."""
    if isinstance(value, Tensor):
        if value.dim():
            yield path, tuple(value.shape)
    elif isinstance(value, list):
        if value and not isinstance(value[0], int | float | str):
            yield (*path, _LENGTH), (len(value),)
            yield from _sizes(value[0], (*path, 0), depth)
    elif isinstance(value, tuple):
        for index, part in enumerate(value):
            yield from _sizes(part, (*path, index), depth)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(key, str | int):
                yield from _sizes(part, (*path, key), depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, OPAQUE):
        for name, part in vars(value).items():
            yield from _sizes(part, (*path, f".{name}"), depth - 1)


def _sizes_of_batch(batch: Any) -> Iterator[tuple[_Path, _Size]]:
    """The same of a whole batch. A list is of its parts, as torch's loader makes it, or of rows."""
    if isinstance(batch, list):
        if _may_be_rows(batch):
            yield (_LENGTH,), (len(batch),)
        batch = tuple(batch)
    yield from _sizes(batch)


def _may_be_rows(values: list[Any]) -> bool:
    """Whether the items of a list are all alike: words, dicts, pictures, more than a pair of."""
    kinds = set(map(type, values))
    if len(kinds) != 1 or not isinstance(values[0], Tensor):
        return len(kinds) == 1
    return len(values) > 2 and len({value.shape for value in values}) == 1


def _is_plain(batch: Any, by_number: Mapping[int, _BatchItem], first: Sequence[_BatchItem]) -> bool:
    """Whether rows are known although the loss shows none.

    They are where the target of a pair is a tensor, or all tensors have as many.
    """
    if len(by_number) != 1:
        return False
    ((number, place),) = by_number.items()
    if first:
        return isinstance(batch[1], Tensor) or first[0].size[0] == number
    return _LENGTH not in place.path


def _size_at(value: Any, path: _Path) -> _Size | None:
    """The size of what is at the end of a path, or None."""
    for step in path:
        if step == _LENGTH:
            return (len(value),) if isinstance(value, list) else None
        try:
            if isinstance(step, str) and step.startswith("."):
                value = getattr(value, step[1:])
            else:
                value = value[step]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return tuple(value.shape) if isinstance(value, Tensor) else None
