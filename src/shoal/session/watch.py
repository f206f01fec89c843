"""Hooks on a parallelised model: they see forward, count its rows, and put the border round it.

    before forward   this rank's rows are counted, unless gradients are off: evaluation on one rank
                     is free; where only the output tells them, after it
    after forward    the output goes over the border, where backward opens the engine's round
    loss             where it has a weight of its own (it counts its terms by `count=`, is a sum, or
                     only its target tells the rows), it goes over the border, too

A compiled model runs them as they are: `torch.compile` does not look into them.

A deep copy or a pickle of the model takes none of this along: it is an ordinary model.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.contracts.cadence import Event
from shoal.core.errors import UsageError
from shoal.core.terms import INPUT, OF_ROWS, OUTPUT, TARGET, Terms
from shoal.engine.border import Border
from shoal.engine.engine import Engine
from shoal.engine.weights import Weigher, Weight
from shoal.optim.owners import Owners
from shoal.profiling.terms import count_of
from shoal.session.additions import check_bare
from shoal.strategies.copies import StaysBehind, leaves_behind
from shoal.tensors.guarded import ComingParameter

_COUNTED = "_shoal_counted"  # where a function has what weighs it
Count = Callable[[Any, Any], float | Tensor]


@dataclass(frozen=True)
class Watched:
    """The hooks on a model, its parameters and its loss; keeps none of them alive."""

    hooks: Sequence[RemovableHandle]
    border: ref[Border]
    counted: ref[_Counted] | None = None  # where the loss weighs itself

    def release(self) -> None:
        """Take the hooks off. A loss that was wrapped does no more than what it wraps."""
        for hook in self.hooks:
            hook.remove()
        if (border := self.border()) is not None:
            border.engine.release_weighing()
        if self.counted is not None and (counted := self.counted()) is not None:
            counted.release()


def watch(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    count: Count | None,
    engine: Engine,
    weigher: Weigher,
    owners: Owners | None,
    terms: Terms = OF_ROWS,
) -> tuple[Callable[..., Any] | None, Watched]:
    """Hang the hooks on the model, and on a loss that weighs itself; the loss to use from now on.

    `terms` says what a loss without a `count` is a mean over, or that it is a sum.
    """
    border = Border(model, engine)
    leaves_behind(type(model))
    engine.before_accumulating(border.weigh_parameters)
    hooks = []
    if owners is not None:
        hooks.append(model.register_forward_pre_hook(_BeforeCompiled(owners)))
    if count is None and terms.source == TARGET and not terms.summed:
        count = partial(_rows_of_target, terms)
    rows = OF_ROWS if terms.source == TARGET else terms
    counting = _Counting(border, weigher, rows, by_loss=count is not None or terms.summed)
    before = _Before(counting)
    hooks.append(model.register_forward_pre_hook(before, with_kwargs=True))
    after = _After(counting, before)
    hooks.append(model.register_forward_hook(after, with_kwargs=True, always_call=True))
    if not counting.by_loss:
        return loss_fn, Watched(hooks, ref(border))
    counted = _Counted(border, weigher, count, loss_fn)
    border.loss_weighs = True
    if loss_fn is None:
        hooks.append(model.register_forward_hook(_CountedModel(counted), with_kwargs=True))
    elif isinstance(loss_fn, nn.Module):
        leaves_behind(type(loss_fn))
        hooks.append(loss_fn.register_forward_hook(_CountedLoss(counted), with_kwargs=True))
    else:
        loss_fn = _wrapped(loss_fn, counted)
    return loss_fn, Watched(hooks, ref(border), ref(counted))


def _rows_of_target(terms: Terms, output: Any, target: Any) -> float:
    return count_of(terms, target)


def _wrapped(loss_fn: Callable[..., Any], counted: _Counted) -> Callable[..., Any]:
    """A loss that is a plain function, weighed."""

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return counted(args, kwargs, loss_fn(*args, **kwargs))

    wrapped.__dict__[_COUNTED] = counted
    return wrapped


def is_counted(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss weighs itself by the `count` of a model that is parallelised."""
    if isinstance(loss_fn, nn.Module):
        return any(isinstance(hook, _CountedLoss) for hook in loss_fn._forward_hooks.values())
    counted: _Counted | None = getattr(loss_fn, _COUNTED, None)
    return counted is not None and counted.weighs


@final
class _BeforeCompiled(StaysBehind):
    """Waits for the parameters of compiled blocks, which need parameters that are there."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any) -> None:
        for inner in module.modules():
            if inner._compiled_call_impl is not None or "_orig_mod" in inner._modules:
                for parameter in inner.parameters():
                    if isinstance(parameter, ComingParameter):
                        self._owners.arrive(parameter)


@final
class _Counting:
    """Counts the rows of calls of a model.

    Args:
        border: the model's.
        weigher: tells the other ranks, where they are to know.
        terms: where the rows are seen.
        by_loss: whether the loss weighs itself, and goes over the border, too.
    """

    def __init__(self, border: Border, weigher: Weigher, terms: Terms, *, by_loss: bool) -> None:
        self._border, self._weigher, self._terms = border, weigher, terms
        self.by_loss = by_loss

    def begun(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Weight, Any]:
        """A call begins: its weight, and what the model is to be called with."""
        border = self._border
        border.check()
        border.engine.happened(Event.FORWARD_ENTERED)
        weight = self._weigher.begin()
        if self._terms.source == INPUT:
            self._counted(weight, count_of(self._terms, (args, kwargs)), (args, kwargs))
        return weight, border.inward((args, kwargs), weight)

    def ended(self, weight: Weight, args: Any, kwargs: Any, output: Any) -> Any:
        """It ends: the output to return, or None for the same."""
        if output is None:  # it has failed, or gives nothing
            return None
        if self._terms.source == OUTPUT:
            self._counted(weight, count_of(self._terms, output), (args, kwargs))
        if self._terms.kept:
            self._border.outward_kept(weight)
        return self._border.outward(output, weight)

    def _counted(self, weight: Weight, count: float, batch: Any) -> None:
        border = self._border
        if self.by_loss:
            self._weigher.counted(weight, count)
            border.engine.latest = weight
            return
        self._weigher.counted(weight, count, batch)
        border.engine.called(weight, asks=False)
        if not border.engine.goes_along:
            border.weigh_parameters()


@final
class _Before(StaysBehind):
    """Makes the weights, and keeps each running call's own.

    A model that calls itself is weighed outside only.
    """

    def __init__(self, counting: _Counting) -> None:
        self._counting = counting
        self._of_thread = threading.local()

    @property
    def _running(self) -> list[tuple[FrameType, Weight | None]]:
        """The calls of this thread, each by the frame that makes it."""
        running: list[tuple[FrameType, Weight | None]] = self._of_thread.__dict__.setdefault(
            "running", []
        )
        return running

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = _past(type(self).__call__, sys._getframe(1))
        while self._running and not _is_under(caller, self._running[-1][0]):
            self._running.pop()  # that call was broken off (Ctrl-C), for which torch calls no hooks
        self._running.append((caller, None))
        if (
            len(self._running) > 1
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        ):
            return None
        check_bare(module)
        weight, called_with = self._counting.begun(args, kwargs)
        self._running[-1] = (caller, weight)
        return called_with

    def ended(self) -> Weight | None:
        """The weight of the call that ends; None for one that is not weighed."""
        return self._running.pop()[1] if self._running else None


def _past(disabled: Callable[..., Any], frame: FrameType) -> FrameType:
    """The frame that has called a function, past what keeps a compiler out of it."""
    caller = frame.f_back if frame.f_code is disabled.__code__ else frame
    assert caller is not None
    return caller


def _is_under(frame: FrameType | None, other: FrameType) -> bool:
    """Whether `other` has called, by way of any others, what runs in `frame`."""
    while frame is not None and frame is not other:
        frame = frame.f_back
    return frame is not None


@final
class _After(StaysBehind):
    def __init__(self, counting: _Counting, before: _Before) -> None:
        self._counting, self._before = counting, before

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        weight = self._before.ended()
        return None if weight is None else self._counting.ended(weight, args, kwargs, output)


@final
class _Counted:
    """Weighs a loss by its own count of terms; one that is a sum where there is no count."""

    def __init__(
        self,
        border: Border,
        weigher: Weigher,
        count: Count | None,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        self._border: Border | None = border
        self._weigher, self._count = weigher, count
        self._names = _argument_names(
            loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        )

    @property
    def weighs(self) -> bool:
        """Whether it does still."""
        return self._border is not None

    def release(self) -> None:
        """Leave losses as they are, from here on."""
        self._border = None

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
        border, weigher = self._border, self._weigher
        border.check()
        rows = border.engine.latest
        if self._count is None:
            weight = weigher.of_sum(rows)
        else:
            with torch.no_grad():
                count = _number(self._count(output, target))
            weight = weigher.of_loss(count, rows, (output, target))
        border.engine.called(weight, asks=True)
        border.weigh_parameters()
        return border.outward(loss, weight)


def _number(count: Any) -> float:
    """What `count` has given, as a number of terms (UsageError where it is none)."""
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):  # also of a tensor with several numbers
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            "count gives no number of terms of the loss",
            got=repr(count)[:80],
            expected="a finite number, at least 0",
            do="give for instance count=lambda output, y: len(y)",
        )
    return number


def _argument_names(function: Callable[..., Any] | None) -> list[str]:
    try:
        return list(inspect.signature(function).parameters) if function is not None else []
    except (TypeError, ValueError):  # written in C
        return []


@final
class _CountedLoss(StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any
    ) -> Any:
        return self._counted(args, kwargs, loss)


@final
class _CountedModel(StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return None
        called_with = (
            kwargs if not args else (args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        )
        return self._counted.weigh(output, called_with, output)
