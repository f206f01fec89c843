"""Finds the number of rows, and whether a loss is a mean or a sum over them, on the sample.

    sum or mean   the loss of some rows, of the same rows twice, and three times: L, 2L, 3L of a
                  sum; L, L, L of a mean; anything else is taken for a mean
    terms         the target's dimensions: its first, and each further one along which the loss is
                  a mean, too (tokens of a text)
    where         training should know the number as early as possible. The first of these places
                  that has it on every rank's sample: the first tensor of the input; the output;
                  any other tensor, or list, of the input; the target, at the loss

If one function computes the loss of the whole batch, only the batch shows terms: the rows of its
target, if the batch is a pair, or else the dimensions that the loss is a mean or a sum over.

A loss that sums over rows and over other things too is neither, and is refused. The sample also
shows how torch's own losses count targets (targets.py), and whether parts of the rows make the loss
of the whole (trials.py). The cost is a few calls of the loss on at most eight rows, or of a model
that returns its own loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.contracts.batch import tensors_of
from shoal.contracts.loss_attributes import kept_values_of
from shoal.contracts.sample import LossFn, Sample, arguments, describe
from shoal.core.errors import SampleError, UsageError
from shoal.core.terms import INPUT, OUTPUT, TARGET, LossOfParts, Targets, Terms
from shoal.profiling.batch_rows import (
    LENGTH,
    Path,
    Size,
    last_with,
    picked,
    picked_of_parts,
    size_at,
    sizes,
    sizes_of_batch,
    tensors_at,
    value_at,
)
from shoal.profiling.targets import LossCalls, SeenTargets, count_targets, targets_of
from shoal.profiling.trials import (
    FEW,
    MEAN,
    NEITHER,
    SUM,
    UNKNOWN,
    Tried,
    Trying,
    has_batch_statistics,
    in_order,
    kind_of,
    matters,
    near,
    nearness,
)

_SMALL_BYTES = 16 << 20  # the largest output that is copied
_COUNT = (
    "say how many terms the loss of a batch is a mean over: "
    "parallelize(…, compute_loss=f, count=lambda batch: len(batch[0]))"
)


@dataclass(frozen=True)
class _BatchItem:
    """A tensor or list in a batch: the way to it, and its size."""

    path: Path
    size: Size

    @property
    def terms(self) -> tuple[Terms, ...]:
        """Terms that it may count, the likelier first."""
        rows = Terms(INPUT, self.path)
        # a table of one row, such as a packed text, has rows in its columns
        is_one_text = len(self.size) == 2 and self.size[0] == 1
        return (replace(rows, dims=(0, 1)), rows) if is_one_text else (rows,)


@dataclass(frozen=True)
class SampleTerms:
    """Places in the sample of one rank where terms of the loss can be counted."""

    kind: str  # kind of the loss: a mean, a sum or neither
    places: tuple[Terms, ...]  # places that count the terms
    kept: bool = False  # modules keep tensors with a history
    targets: tuple[Targets, ...] = ()  # places, if one of torch's losses counts them
    targets_matter: bool = False  # whether there are more or fewer than rows
    unlike: LossOfParts | None = None  # parts of the rows make another loss than the whole


@final
class Outputs:
    """A copy of the model's output, if it is small, so that the model need not run again."""

    def __init__(self) -> None:
        self.copy: Any = None

    def kept_of(self, sample: Sample) -> Sample:
        """Return the same sample with a loss function that copies the output on its way."""
        loss_fn = sample.loss_fn
        if loss_fn is None:
            return sample

        def keeping(output: Any, y: Any) -> Tensor:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.copy = _copy_values(output)
            return loss_fn(output, y)

        return replace(sample, loss_fn=keeping)


def _copy_values(output: Any) -> Any:
    """Copy an output without its history. None if it is large, or not of tensors alone."""
    leaves = pytree.tree_leaves(output)
    if not all(type(leaf) is Tensor and leaf.layout is torch.strided for leaf in leaves):
        return None
    if sum(leaf.nbytes for leaf in leaves) > _SMALL_BYTES:
        return None
    return pytree.tree_map(lambda leaf: leaf.detach().clone(), output)


def seen(
    sample: Sample, counted: bool = False, outputs: Outputs | None = None, rank: int = 0
) -> SampleTerms:
    """Find the terms that this rank's sample shows. Model and loss run some times more.

    If a `compute_loss` has `counted` terms, nothing has to be found.
    """
    how = Trying(counted, rank, nearness(sample.model), once=sample.loss_fn is None)
    kept = any(
        tensor.grad_fn is not None
        for module in sample.model.modules()
        for value in kept_values_of(module).values()
        for tensor in tensors_of(value)
    )
    with torch.no_grad():
        if sample.loss_fn is not None:
            found = _of_loss(sample, sample.loss_fn, how, outputs and outputs.copy)
        elif counted and sample.compute_loss is not None:
            found = SampleTerms(UNKNOWN, (Terms(),))
        else:
            found = _of_whole_loss(sample, how)
    if counted and found.kind == NEITHER:  # the caller counts terms, and so knows
        found = replace(found, kind=UNKNOWN)
    return replace(found, kept=kept)


def agreed_terms(ranks: Sequence[SampleTerms], of_batch: bool = False) -> Terms:
    """Return the terms that every rank's sample shows, the same for all.

    `of_batch` says that only the whole batch can be counted.

    Raises:
        SampleError: the loss is a sum over rows and of something else.
    """
    kinds = {rank.kind for rank in ranks}
    if NEITHER in kinds:
        raise SampleError(
            "the loss is a sum over rows, and of something that does not grow with rows",
            do="let the loss be the sum alone, and add the rest to what it returns; or give a mean "
            "over rows",
        )
    common = [place for place in ranks[0].places if all(place in rank.places for rank in ranks)]
    first = [place for place in common if place.source == INPUT and not place.path]
    by_output = [place for place in common if place.source == OUTPUT]
    elsewhere = [place for place in common if place.source == INPUT and place.path]
    ordered = [*first, *by_output, *elsewhere] if len(first) == 1 else []
    chosen = next(iter([*ordered, *by_output, *elsewhere, *first]), Terms(TARGET))
    if of_batch and chosen.source == TARGET:
        raise SampleError(
            "the ranks' samples have their rows in different places of the batch",
            got="; ".join(f"rank {rank}: {each.places[0].path}" for rank, each in enumerate(ranks)),
            do=_COUNT,
        )
    targets = _agreed_targets(ranks)
    return replace(
        chosen,
        summed=SUM in kinds and MEAN not in kinds and targets is None,
        kept=any(rank.kept for rank in ranks),
        targets=targets,
        unlike=next((r.unlike for r in ranks if r.unlike is not None and targets is None), None),
    )


def _agreed_targets(ranks: Sequence[SampleTerms]) -> Targets | None:
    """Return the targets that all ranks' samples count alike; None if they count rows."""
    if not any(rank.targets_matter for rank in ranks):
        return None
    by_size = [{replace(t, by_size=True): t.by_size for t in rank.targets} for rank in ranks]
    for targets in by_size[0]:
        if all(targets in of_rank for of_rank in by_size):
            return replace(targets, by_size=all(of_rank[targets] for of_rank in by_size))
    return None


def count_of(terms: Terms, value: Any) -> float:
    """Return the number of terms in a batch. `terms` names its place: the inputs, output or target.

    Raises:
        UsageError: the value has not the sample's form.
    """
    size = size_at(value, terms.path) if terms.path else next(sizes(value), ((), (1,)))[1]
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


def count_seen(targets: Targets, batch: Any, holder: Any = None) -> float:
    """Return the weights of a batch's targets that count (UsageError if it has no targets)."""
    return float(count_targets(targets, value_at(batch, targets.path), holder))


def _of_loss(sample: Sample, loss_fn: LossFn, how: Trying, output: Any = None) -> SampleTerms:
    if output is None:
        # gradients on, as in training, because some models look (checkpointing)
        with torch.enable_grad():
            output = pytree.tree_map(_detach, sample.output())
    else:
        sample.renew()
    y = sample.y
    target = next(sizes(y), None)
    if target is None or not target[1][0]:
        return SampleTerms(UNKNOWN, (Terms(),))
    number = target[1][0]

    def loss_of(rows: Sequence[int]) -> float:
        return float(loss_fn(picked(output, number, rows), picked(y, number, rows)))

    with LossCalls() as watched:
        loss = loss_fn(output, y)
    targets = targets_of(watched.calls, loss, tensors_at(y), loss_fn)
    rows = in_order(number, last_with(y, number))
    tried = kind_of(loss_of, rows)
    how = replace(how, near=nearness(sample.model, output))
    unlike = how.parts(loss_of, rows, tried)
    kind, dims = tried.kind, [0]
    if kind == MEAN and isinstance(output, Tensor) and isinstance(y, Tensor):
        dims += _mean_along(loss_fn, output, y)
    counted = [dims]
    if len(dims) > 1 and len(dims) == len(target[1]) and y.is_floating_point():
        counted.append(dims[:-1])  # the last dimension has features, of any number
    sources = {
        INPUT: list(sizes(arguments(sample.model, sample.x))),
        OUTPUT: list(sizes(output))[:1],
    }
    return _show_terms(
        kind,
        tuple(_places(sources, [[target[1][d] for d in each] for each in counted])),
        targets,
        unlike,
    )


def _show_terms(
    kind: str, places: tuple[Terms, ...], seen: SeenTargets | None, unlike: LossOfParts | None
) -> SampleTerms:
    targets, matter = ((), False) if seen is None else (seen.fitting, seen.matters)
    return SampleTerms(kind, places, targets=targets, targets_matter=matter, unlike=unlike)


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


@final
class _WholeLoss:
    """The loss of some rows of a batch, by a function of all of it or by the model itself.

    It looks at the first call, which shows how one of torch's losses counts its targets.
    """

    def __init__(self, sample: Sample, place: _BatchItem) -> None:
        self.number = place.size[0]
        self.targets: SeenTargets | None = None
        self._sample, self._looks = sample, True
        of_parts = sample.compute_loss is not None and place.path[:1] != (LENGTH,)
        self._picked = picked_of_parts if of_parts else picked

    @property
    def rows(self) -> list[int]:
        """Rows for the trial."""
        return in_order(self.number, last_with(self._as_in_training(self._sample.x), self.number))

    def __call__(self, rows: Sequence[int]) -> float:
        sample = self._sample
        sample.renew()
        batch = self._picked(sample.x, self.number, rows)
        tensors = tensors_at(self._as_in_training(batch)) if self._looks else []
        watched = LossCalls()
        # switch gradients on: they show the loss in a tuple
        with torch.enable_grad(), watched if self._looks else nullcontext():
            loss = sample.loss_of(batch)
        if self._looks:
            self.targets = targets_of(watched.calls, loss, tensors, None, rows=len(rows))
        self._looks = False
        return float(loss.detach())

    def _as_in_training(self, batch: Any) -> Any:
        """Return the batch as training counts it."""
        by_function = self._sample.compute_loss is not None
        return batch if by_function else arguments(self._sample.model, batch)

    def seen(self, tried: Tried, places: tuple[Terms, ...], how: Trying) -> SampleTerms:
        """Return the terms that the trial has shown, with a trial of parts."""
        unlike = None
        if not has_batch_statistics(self._sample.model):
            unlike = how.parts(self, self.rows, tried)
        return _show_terms(tried.kind, places, self.targets, unlike)


def _of_whole_loss(sample: Sample, how: Trying) -> SampleTerms:
    """Try a function of the whole batch, which alone tells the terms."""
    model = sample.model
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # no dropout, and no statistics
    try:
        if sample.compute_loss is not None:
            return _of_batch(sample, how)
        place = _BatchItem((), next(sizes(arguments(model, sample.x)), ((), (0,)))[1])
        loss_of = _WholeLoss(sample, place)
        return loss_of.seen(kind_of(loss_of, loss_of.rows), place.terms, how)
    finally:
        sample.renew()
        for module, mode in modes:
            module.training = mode


def _of_batch(sample: Sample, how: Trying) -> SampleTerms:
    """Find the place of a batch's rows, and the kind of its loss over them."""
    batch = sample.x
    places = [_BatchItem(path, size) for path, size in sizes_of_batch(batch)]
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    targets = [place for place in places if is_pair and place.path[:1] == (1,)][:1]
    by_number: dict[int, _BatchItem] = {}
    for place in targets or places:
        by_number.setdefault(place.size[0], place)
    if is_pair and _has_objects(batch[1]):
        # the target is a tuple of objects, and sizes inside one of them count no rows
        by_number.clear()
    losses = {number: _WholeLoss(sample, place) for number, place in by_number.items()}
    tries = {number: kind_of(loss_of, loss_of.rows) for number, loss_of in losses.items()}
    shown = [number for number, tried in tries.items() if tried.kind != UNKNOWN]
    if not shown and not _is_plain(batch, by_number, places[:1] if targets else []):
        raise SampleError(
            "nobody can tell how many rows the batch has",
            got=f"batch = {describe(batch)}",
            expected="tensors that have as many rows, over which the loss is a mean or a sum",
            do=_COUNT,
        )

    def likely(number: int) -> tuple[bool, bool, bool, int]:
        """Compare: the loss depends on the rows, they are several, in a list, with many tensors."""
        by_rows = len(shown) > 1 and matters(losses[number], min(number, FEW))
        of_list = by_number[number].path == (LENGTH,)
        return by_rows, number > 1, of_list, sum(each.size[0] == number for each in places)

    number = max(shown or tries, key=likely)
    same = [place for place in (*places[:1], by_number[number]) if place.size[0] == number]
    found = tuple(terms for place in same for terms in place.terms)
    return losses[number].seen(tries[number], found, how)


def _has_objects(value: Any) -> bool:
    """Return whether a value is a tuple of objects, such as a dict for each picture."""
    return isinstance(value, tuple) and not all(isinstance(item, Tensor) for item in value)


def _mean_along(loss_fn: LossFn, output: Tensor, y: Tensor) -> list[int]:
    """Return the target's further dimensions along which the loss is a mean."""
    along = _matching(output.shape, y.shape)
    if along is None:
        return []
    output, y = output[:FEW], y[:FEW]
    try:
        whole = float(loss_fn(output, y))
        return [
            dim
            for dim in range(1, y.dim())
            if near(
                float(loss_fn(torch.cat([output] * 2, along[dim]), torch.cat([y] * 2, dim))), whole
            )
        ]
    except Exception:  # the loss may check sizes
        return []


def _matching(output: Size, target: Size) -> list[int] | None:
    """Return the output's dimensions that match the target's: all, or all but one of classes."""
    if output == target or output[:-1] == target:
        return list(range(len(target)))
    if len(output) == 1 + len(target) and (output[:1] + output[2:]) == target:
        return [0, *range(2, len(output))]
    return None


def _places(
    sources: Mapping[str, Sequence[tuple[Path, Size]]], wanted: Sequence[Sequence[int]]
) -> Iterator[Terms]:
    """Yield places that count as many terms, by dimensions of these sizes or their product."""
    for source, there in sources.items():
        for index, (path, size) in enumerate(there):
            for parts in wanted:
                found = _dims_of(size, parts)
                yield from (Terms(source, path if index else (), dims) for dims in found)
                if found:
                    break


def _dims_of(size: Size, parts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the dimensions of these sizes in this order, or dimensions of the same product.

    Such a product has the first dimension in it, or features could be as many by chance.
    """
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
        if 0 in dims and prod(size[dim] for dim in dims) == prod(parts)
    ]


def _is_plain(batch: Any, by_number: Mapping[int, _BatchItem], first: Sequence[_BatchItem]) -> bool:
    """Return whether rows are known although the loss shows none.

    They are where the target of a pair is a tensor, or all tensors have as many.
    """
    if len(by_number) != 1:
        return False
    ((number, place),) = by_number.items()
    if first:
        return isinstance(batch[1], Tensor) or first[0].size[0] == number
    return LENGTH not in place.path
