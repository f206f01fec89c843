"""Hooks on a parallelised model: they see forward, count its rows, and put the border around it.

    before forward   this rank's rows are counted, unless gradients are off: evaluation on one
                     rank is free; if only the output tells them, they are counted after it
    after forward    the output crosses the border, where backward opens the engine's round
    loss             if it has a weight of its own (it counts its terms by `count=`, is a sum, or
                     only its target tells the rows), it crosses the border, too
    compute_loss     is one call of the model (computed_loss.py)

A compiled model runs them unchanged: `torch.compile` does not look into them.

A deep copy or a pickle of the model leaves all this behind: it is an ordinary model.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, final
from weakref import WeakMethod, ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.contracts.batch import tensors_of
from shoal.core.eager_methods import eager
from shoal.core.terms import OF_ROWS, TARGET, Targets, Terms
from shoal.engine.border import Border
from shoal.optim.owners import Owners
from shoal.profiling.terms import count_of, count_seen
from shoal.session.additions import check_bare
from shoal.session.calls import Calls, Count, Counting, number_of
from shoal.session.computed_loss import Computed
from shoal.session.job import TrainingJob
from shoal.session.running import Running
from shoal.strategies.copies import StaysBehind, leaves_behind
from shoal.tensors.cut_output import CutOutput
from shoal.tensors.guarded_parameters import ComingParameter

COUNTED = "_shoal_counted"  # attribute of a function: the object that weighs it
_NOT_CALLED = (
    "loss_fn that parallelize returned: its gradient is taken for a mean over this rank's rows. "
    "But that loss_fn has a count, is a sum, or is a mean over rows that only its target shows. "
    "Call it: loss = loss_fn(model(x), y)"
)
_NOT_COMPUTED = (
    "compute_loss that parallelize returned: its gradient is taken for a mean over the rows of the "
    "model's input. Call what parallelize returned: loss = compute_loss(model, batch)"
)


@dataclass(frozen=True)
class Watched:
    """The hooks on a model, its parameters and its loss. It keeps none of them alive."""

    hooks: Sequence[RemovableHandle]
    border: ref[Border]
    counted: ref[_Counted] | ref[Computed] | None = None  # the record of a loss that weighs itself

    def release(self) -> None:
        """Take the hooks off. A wrapped loss then only calls the original one."""
        if (border := self.border()) is not None:  # the hooks hold it
            border.engine.release_weighing()
        for hook in self.hooks:
            hook.remove()
        if self.counted is not None and (counted := self.counted()) is not None:
            counted.release()


def watch(
    job: TrainingJob, running: Running, terms: Terms = OF_ROWS, before: Watched | None = None
) -> tuple[Callable[..., Any] | None, Watched]:
    """Hang the hooks on the model, and on a loss that weighs itself. Return the loss to use.

    Args:
        job: the model, its loss and its optimizers. With a `compute_loss`, which is returned in
            place of a loss, `count` takes the batch.
        running: the running parts of the model.
        terms: the terms that a loss without a `count` is a mean or a sum over.
        before: the hooks under an earlier plan, which have been released. The loss that was
            returned then works like this one.
    """
    model, engine, weigher = job.model, running.engine, running.weigher
    count, terms = _counts(job, terms)
    border, calls = Border(model, engine), Calls()
    kept = before.counted() if before is not None and before.counted is not None else None
    leaves_behind(type(model))
    engine.before_accumulating(_if_there(border.weigh_parameters))
    hooks = []
    if running.owners is not None:
        hooks.append(model.register_forward_pre_hook(_BeforeCompiled(running.owners)))
    if job.compute_loss is not None:
        hooks += _weigh_calls(model, calls, Counting(border, weigher, OF_ROWS, by_loss=True))
        # modules keep means over rows, and a loss over other terms may be added to them
        apart = count is not None and terms.kept and not (job.alike or terms.summed)
        by_loss, of_rows = terms.summed or apart, None if apart else count
        of_batch = Counting(border, weigher, terms, by_loss=by_loss, count=of_rows)
        computed = _make_computed(job, of_batch, calls, terms, count if apart else None, kept)
        # otherwise other functions than this one are right, too
        if count is not None or terms.summed:
            border.awaited_loss = _NOT_COMPUTED
        function = computed.function()
        function.__dict__[COUNTED] = computed
        return function, Watched(hooks, ref(border), ref(computed))
    if count is None and terms.source == TARGET and not terms.summed:
        count = partial(_rows_of_target, terms)
    rows = OF_ROWS if terms.source == TARGET else terms
    counting = _counting(job, count, partial(Counting, border, weigher, rows), terms.summed)
    hooks += _weigh_calls(model, calls, counting)
    if not counting.by_loss:
        return job.loss_fn, Watched(hooks, ref(border))
    counted = _Counted(border, counting, count, job.loss_fn)
    if isinstance(kept, _Counted):
        kept.go_on(border, counting)
        counted = kept
    border.awaited_loss = _NOT_CALLED
    loss_fn, hook = _counting_loss(model, job.loss_fn, counted)
    hooks += [] if hook is None else [hook]
    return loss_fn, Watched(hooks, ref(border), ref(counted))


def _make_computed(
    job: TrainingJob,
    of_batch: Counting,
    calls: Calls,
    terms: Terms,
    count: Count | None,
    before: Any,
) -> Computed:
    """Make the record of a compute_loss, or let the one of an earlier plan go on."""
    if isinstance(before, Computed):
        before.go_on(of_batch, calls, count)
        return before
    assert job.compute_loss is not None
    return Computed(job.model, job.compute_loss, of_batch, calls, summed=terms.summed, count=count)


def _counts(job: TrainingJob, terms: Terms) -> tuple[Count | None, Terms]:
    """Return a count of the terms of a loss or batch, if there is one, and the sample's terms."""
    if job.alike:
        return _one, replace(OF_ROWS, kept=terms.kept)
    if job.count is not None or terms.targets is None:
        return job.count, terms
    if job.loss_fn is None:
        return partial(count_seen, terms.targets), terms
    return partial(_weights_of_target, terms.targets, job.loss_fn), terms


def _counting(
    job: TrainingJob, count: Count | None, make: Callable[..., Counting], summed: bool
) -> Counting:
    """Count the inputs of calls, if that needs no look at the loss. Otherwise count the loss."""
    if job.alike or (job.loss_fn is None and job.count is None):
        return make(by_loss=summed, count=count)
    return make(by_loss=summed or count is not None)


def _one(*batch: Any) -> float:
    """Count every call as one."""
    return 1.0


def _weights_of_target(targets: Targets, loss_fn: Any, output: Any, target: Any) -> float:
    return count_seen(targets, target, loss_fn)


def _if_there(method: Callable[[], None]) -> Callable[[], None]:
    """Make a function that calls a method as long as its object lives.

    A border holds autograd's nodes of the parameters, and no collector sees them. If the engine
    held the border, owned parameters, which lead to the engine, would never be given back.
    """
    weak = WeakMethod(method)

    def call() -> None:
        if (there := weak()) is not None:
            there()

    return call


def _counting_loss(
    model: nn.Module, loss_fn: Callable[..., Any] | None, counted: _Counted
) -> tuple[Callable[..., Any] | None, RemovableHandle | None]:
    """Return the loss that weighs itself, and its hook, unless a plain function is wrapped."""
    if loss_fn is None:
        return None, model.register_forward_hook(_CountedModel(counted), with_kwargs=True)
    if isinstance(loss_fn, nn.Module):
        leaves_behind(type(loss_fn))
        return loss_fn, loss_fn.register_forward_hook(_CountedLoss(counted), with_kwargs=True)
    return _wrap(loss_fn, counted), None


def _weigh_calls(model: nn.Module, calls: Calls, counting: Counting) -> list[RemovableHandle]:
    """Weigh calls of the model that are not inside another call."""
    before, after = _Before(calls, counting), _After(calls, counting)
    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _rows_of_target(terms: Terms, output: Any, target: Any) -> float:
    return count_of(terms, target)


def _wrap(loss_fn: Callable[..., Any], counted: _Counted) -> Callable[..., Any]:
    """Wrap a loss that is a plain function, so that it is weighed."""

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return counted(args, kwargs, loss_fn(*args, **kwargs))

    wrapped.__dict__[COUNTED] = counted
    return wrapped


def is_counted(loss_fn: Callable[..., Any] | None) -> bool:
    """Return whether a loss weighs itself by the `count` of a parallelised model."""
    if isinstance(loss_fn, nn.Module):
        return any(isinstance(hook, _CountedLoss) for hook in loss_fn._forward_hooks.values())
    counted = getattr(loss_fn, COUNTED, None)
    return counted is not None and bool(counted.weighs)


@final
class _BeforeCompiled(StaysBehind):
    """Waits for the parameters of compiled blocks, which need parameters that have arrived."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    @eager
    def __call__(self, module: nn.Module, args: Any) -> None:
        for inner in module.modules():
            if inner._compiled_call_impl is not None or "_orig_mod" in inner._modules:
                for parameter in inner.parameters():
                    if isinstance(parameter, ComingParameter):
                        self._owners.arrive(parameter)


@final
class _Before(StaysBehind):
    """Gives each call its weight before it runs."""

    def __init__(self, calls: Calls, counting: Counting) -> None:
        self._calls, self._counting = calls, counting

    @eager
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._calls.enter(_past(type(self).__call__, sys._getframe(1))):
            self._counting.hear()
            return None
        check_bare(module)
        begun = self._counting.begun((args, kwargs))
        if begun is None:
            return None
        weight, called_with = begun
        self._calls.weigh(weight)
        return called_with


def _past(disabled: Callable[..., Any], frame: FrameType) -> FrameType:
    """Return the frame that has called a function, past the wrapper against compilers."""
    caller = frame.f_back if frame.f_code is disabled.__code__ else frame
    assert caller is not None
    return caller


@final
class _After(StaysBehind):
    def __init__(self, calls: Calls, counting: Counting) -> None:
        self._calls, self._counting = calls, counting

    @eager
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        for tensor in tensors_of(output):
            if isinstance(tensor, CutOutput):
                tensor.hold()
        weight = self._calls.leave()
        return None if weight is None else self._counting.ended(weight, (args, kwargs), output)


@final
class _Counted:
    """Weighs a loss by its own count of terms. Without a count, the loss is a sum."""

    def __init__(
        self,
        border: Border,
        counting: Counting,
        count: Count | None,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        self._border: Border | None = border
        self._counting, self._count = counting, count
        self._names = _argument_names(
            loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        )

    @property
    def weighs(self) -> bool:
        """Return whether it still weighs."""
        return self._border is not None

    def release(self) -> None:
        """Leave losses unchanged from now on."""
        self._border = None

    def go_on(self, border: Border, counting: Counting) -> None:
        """Weigh again, under another plan."""
        self._border, self._counting = border, counting

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> Any:
        if self._border is None or not torch.is_grad_enabled():
            return loss
        by_name = sorted(
            kwargs,
            key=lambda name: self._names.index(name) if name in self._names else len(self._names),
        )
        output, target = (*args, *(kwargs[name] for name in by_name), None)[:2]
        return self.weigh(output, target, loss)

    def weigh(self, output: Any, target: Any, loss: Any) -> Any:
        assert self._border is not None
        self._border.check()
        if not self._border.trains:
            return loss
        rows = self._border.engine.latest
        if self._count is None:
            return self._counting.summed(rows, loss)
        count = number_of(self._count, output, target)
        return self._counting.of_terms(count, rows, (output, target), loss)


def _argument_names(function: Callable[..., Any] | None) -> list[str]:
    try:
        return list(inspect.signature(function).parameters) if function is not None else []
    except (TypeError, ValueError):  # written in C
        return []


@final
class _CountedLoss(StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    @eager
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any
    ) -> Any:
        return self._counted(args, kwargs, loss)


@final
class _CountedModel(StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    @eager
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return None
        called_with = (
            kwargs if not args else (args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        )
        return self._counted.weigh(output, called_with, output)
