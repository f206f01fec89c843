"""Finds out whether a pipeline may cut a rank's batch into parts: the model treats rows apart.

It runs the sample whole and in parts, compares the outputs, and takes the time. It does so if the
user asks for parts, or if the planner may choose a pipeline, and parts with it. Costs three
forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.loss_attributes import kept_values_of
from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.state import TensorSlot, states
from shoal.contracts.strategy import Strategy
from shoal.core.errors import PlanError
from shoal.core.facts import Excerpt, Facts, LayerProfile, ModelProfile
from shoal.core.pieces import cut_sizes
from shoal.core.plan import Plan
from shoal.core.registry import named
from shoal.pipeline.calls import ModelCall
from shoal.pipeline.parts import RowPart, RowParts, joined, rows_of
from shoal.pipeline.trees import copied, mapped, tensors_in
from shoal.profiling.tails import close
from shoal.strategies.uses import uses_in

_FEWEST = 2  # number of parts that are tried if the user gives none
_UNTRIED = "nobody has tried it"
_NO_ROWS = "no rank's sample has two rows, so nobody can try parts of them"
_OTHERWISE = "in parts the model computes something else than for all rows of a rank at once"
_OWN_LOSS = (
    "the model returns its own loss, which is computed over all rows of a rank. Return the output, "
    "and give parallelize a loss_fn"
)


@dataclass(frozen=True)
class RowFacts(Facts):
    """Whether a model treats the rows of a batch apart, as the sample shows.

    Args:
        reason: why a rank's batch cannot be cut; '' if it can.
        calls: the form of each call of the model, and whether each tensor has the rows first.
        rows: rows of the sample, if it was tried in parts.
        added: time that each part but the first adds, as a fraction of the time for all rows.
    """

    reason: str = ""
    calls: tuple[tuple[str, tuple[bool, ...]], ...] = ()
    rows: int = 0
    added: float = 0.0

    def slower(self, parts: int) -> float:
        """Return the time of so many parts, as a multiple of the time for all rows at once."""
        return 1.0 + self.added * (parts - 1)

    def in_excerpt(self, layer: LayerProfile, excerpt: Excerpt) -> RowFacts:
        return replace(self, rows=int(self.rows * excerpt.rows))

    @classmethod
    def of_ranks(cls, ranks: Sequence[RowFacts]) -> RowFacts:
        tried = [facts for facts in ranks if facts.reason != _NO_ROWS]
        if not tried:
            return ranks[0]
        known: dict[str, tuple[bool, ...]] = {}
        for form, cut in (call for facts in tried for call in facts.calls):
            before = known.get(form, cut)
            known[form] = tuple(a and b for a, b in zip(before, cut, strict=True))
        reason = next((facts.reason for facts in tried if facts.reason), "")
        rows, added = max(facts.rows for facts in tried), median(facts.added for facts in tried)
        return cls(reason, tuple(known.items()), rows, added)


@final
class RowProbe(Probe):
    """Tries the sample in parts, if a pipeline may use parts."""

    def measure(self, layer: Layer, trial: Trial) -> RowFacts:
        beside_tail = trial.micro_batches is not None
        if trial.row_parts is None and not beside_tail and not uses_in(trial)[layer.name].reason:
            return trial.once(_try_by_itself)
        return trial.once(_try) if (trial.row_parts or 1) > 1 else RowFacts(_UNTRIED)


def is_pipelined(plan: Plan) -> bool:
    """Return whether a plan gives layers to a pipeline."""
    return any(named(Strategy, choice.strategy).role.names_ranks for choice in plan.choices)


def check_row_parts(plan: Plan, profile: ModelProfile) -> None:
    """Raise PlanError if a pipeline cuts ranks' batches but rows depend on one another."""
    if plan.micro_batches == 1 or not is_pipelined(plan):
        return
    if reason := whole_rows(profile):
        raise PlanError(
            f"a pipeline cannot cut the batch of a rank into parts: {reason}",
            got=f"micro_batches={plan.micro_batches}",
            do="give micro_batches=1: each rank's batch is then one micro-batch",
        )


def whole_rows(profile: ModelProfile) -> str:
    """Return why the batch of a rank must go through a pipeline whole; '' if it may go in parts."""
    moving = [state.name for state in profile.moving if not state.name.startswith("(loss)")]
    by_all = f"training changes buffer {moving[0]} by all rows of a rank" if moving else ""
    return _facts_of(profile).reason or by_all


def check_buffers(plan: Plan, profile: ModelProfile) -> None:
    """Raise PlanError if a pipeline has a buffer that each rank is to keep for itself."""
    if profile.local and is_pipelined(plan):
        raise PlanError(
            "in a pipeline one rank has a layer and its buffers, so no rank keeps its own",
            where=f"buffer {profile.local[0]}",
            got='buffers="local"',
            do='leave it out, or say "first" or "mean" of the buffer',
        )


def row_parts_of(plan: Plan, profile: ModelProfile | None) -> RowParts:
    """Return how a pipeline divides ranks' rows."""
    if profile is None or plan.micro_batches == 1:
        return RowParts()
    return RowParts(plan.micro_batches, dict(_facts_of(profile).calls))


def _facts_of(profile: ModelProfile) -> RowFacts:
    return profile.layers[0].measured(RowFacts)


def _try_by_itself(trial: Trial) -> RowFacts:
    """Run the sample whole and in parts, for a pipeline that the user has not asked for."""
    try:
        return _try(trial)
    except Exception as error:  # forward is the user's code, and may raise anything
        return RowFacts(f"it cannot be tried ({type(error).__name__}: {error})"[:300])


def _try(trial: Trial) -> RowFacts:
    """Run the sample whole and in parts."""
    model = trial.sample.model
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return RowFacts(f"{name} normalises by all rows of a rank")
    slots = [slot for slot in states(model, None).values() if slot.is_buffer]
    with _keep_buffers(slots) as put_back:
        calls = _calls_of(trial)
        for name, module in model.named_modules():
            for attribute, value in kept_values_of(module).items():
                if any(leaf.requires_grad and not leaf.dim() for leaf in tensors_in(value)):
                    place = ".".join(filter(None, (name, attribute)))
                    return RowFacts(f"forward keeps a number of all rows of a rank ({place})")
        found: dict[str, tuple[bool, ...]] = {}
        parts, rows, added_now = trial.row_parts or _FEWEST, 0, 0.0
        for call, output in calls:
            rows = rows_of(call.shapes)
            if rows < 2:
                return RowFacts(_NO_ROWS)
            trying = _RowTrial(model, call, output, slots, put_back)
            reason = ""
            for cut in dict.fromkeys(_cuts(call)):
                its_reason, added_now = trying.differs(cut, parts)
                if not its_reason:
                    found[call.form] = cut
                    break
                reason = reason or its_reason
            if call.form not in found:
                return RowFacts(reason)
    added = trial.known.figure("parts of rows", float, lambda: added_now)
    return RowFacts("", tuple(found.items()), rows, added)


def _calls_of(trial: Trial) -> list[tuple[ModelCall, Any]]:
    """Run the sample, and return each call of the model with its output."""
    model, calls = trial.sample.model, list[Any]()
    before = list[Any]()

    def called(_: nn.Module, args: Any, kwargs: Any) -> None:
        before.append(copied((args, kwargs)))

    def returned(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        args, kwargs = before.pop()
        calls.append((ModelCall(args, kwargs, {}), copied(_detach(output))))

    hooks = [
        model.register_forward_pre_hook(called, with_kwargs=True),
        model.register_forward_hook(returned, with_kwargs=True),
    ]
    try:
        trial.sample.output()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _cuts(call: ModelCall) -> list[tuple[bool, ...]]:
    """Return which tensors of a call may have the rows first, the likeliest way first.

    A mask of (tokens, tokens) may happen to have as many tokens as there are rows.
    """
    rows = rows_of(call.shapes)
    leading = next(number for number, (shape, _) in enumerate(call.shapes) if shape)
    every = tuple(shape[:1] == (rows,) for shape, _ in call.shapes)
    without_squares = tuple(
        cut and (number == leading or shape != (rows, rows))
        for number, (cut, (shape, _)) in enumerate(zip(every, call.shapes, strict=True))
    )
    return [every, without_squares]


class _RowTrial:
    """One call of a model, tried whole and in parts of its rows.

    Args:
        model: the model.
        call: the call.
        output: the output that the call has returned once.
        slots: the model's buffers.
        put_back: a function that restores the buffers' earlier values.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        output: Any,
        slots: Sequence[TensorSlot],
        put_back: Callable[[], None],
    ) -> None:
        self._model, self._call, self._first = model, call, output
        self._slots, self._put_back = slots, put_back
        self._device = next((tensor.device for tensor in call.tensors), torch.device("cpu"))

    def differs(self, cut: tuple[bool, ...], count: int) -> tuple[str, float]:
        """Return why parts differ from the whole, '' if they do not; and the time a part adds."""
        call, clock = self._call, [_now(self._device)]
        whole, after = self._run(call.tensors)
        clock.append(_now(self._device))
        with self._repeating(whole) as is_repeated:
            if not is_repeated:  # training draws random numbers
                whole, after = self._run(call.tensors)
                clock.append(_now(self._device))
            if any(leaf.is_floating_point() and not leaf.dim() for leaf in tensors_in(whole)):
                return _OWN_LOSS, 0.0
            outputs, begin = [], 0
            rows = rows_of(call.shapes)
            sizes = cut_sizes(rows, min(count, rows))
            for size in sizes:
                part, begin = RowPart(0, begin, size, cut), begin + size
                try:
                    output, its = self._run([part.of(n, t) for n, t in enumerate(call.tensors)])
                except Exception as error:  # forward is the user's code, and may raise anything
                    return f"the model does not take a part of the sample ({error})", 0.0
                if not all(map(_same, after, its)):
                    return "forward changes a buffer by all rows of a rank", 0.0
                outputs.append(output)
            clock.append(_now(self._device))
        whole_s, parts_s = [end - begin for begin, end in pairwise(clock)][-2:]
        added = max(0.0, parts_s / whole_s - 1) / (len(sizes) - 1)
        return "" if _equals_joined(whole, outputs) else _OTHERWISE, added

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the output for these tensors, and the buffers after the call."""
        self._put_back()
        args, kwargs = self._call.with_tensors(copied(tensors))
        output = _detach(self._model(*args, **kwargs))
        return output, [slot.tensor.clone() for slot in self._slots if slot.tensor is not None]

    @contextmanager
    def _repeating(self, second: Any) -> Iterator[bool]:
        """Make the model's outputs repeatable; yield whether they are so in training.

        If training draws random numbers, the model is in evaluation mode in this context.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        first, again = tensors_in(self._first), tensors_in(second)
        same = len(first) == len(again) and all(map(_same, first, again))
        if not same:
            self._model.eval()
        try:
            yield same
        finally:
            for module, was in modes:
                module.training = was


def _now(device: torch.device) -> float:
    """Return the time after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _equals_joined(whole: Any, outputs: Sequence[Any]) -> bool:
    """Return whether an output equals the parts' outputs, joined in order."""
    forms = [pytree.tree_structure(each) for each in (whole, *outputs)]
    parts = [tensors_in(output) for output in outputs]
    wholes = tensors_in(whole)
    if any(form != forms[0] for form in forms) or any(len(p) != len(wholes) for p in parts):
        return False
    return all(
        close(leaf, [own[number] for own in parts]) for number, leaf in enumerate(wholes)
    ) and len(tensors_in(joined(outputs))) == len(wholes)


@contextmanager
def _keep_buffers(slots: Sequence[TensorSlot]) -> Iterator[Any]:
    """Yield a function that restores buffers. It is also called at the end."""
    before = [
        (slot, tensor, tensor.clone()) for slot in slots if (tensor := slot.tensor) is not None
    ]

    def put_back() -> None:
        with torch.no_grad():
            for slot, tensor, value in before:
                slot.put(tensor)
                if not _same(tensor, value):
                    tensor.copy_(value)

    try:
        yield put_back
    finally:
        put_back()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _detach(values: Any) -> Any:
    return mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, values)
