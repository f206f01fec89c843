"""Hooks on a parallelised model: they see forward begin and backward come in, and weigh uneven rows.

    before forward   this rank's rows are sent (Weigher.ask), unless gradients are off: evaluation on one rank is free
    after forward    the output's tensors pass through an identity that, as backward enters, opens the engine's round
                     and multiplies the gradient by this rank's weight
    with count=      the same identity sits on the loss instead, since only there output and target meet

A deep copy or a pickle of the model takes none of this along: it is an ordinary model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.runtime.engine import Engine
from shoal.runtime.weights import Weigher, Weight, rows, scaled

Count = Callable[[Any, Any], float | Tensor]


def watch(
    model: nn.Module, loss_fn: Callable[..., Any] | None, count: Count | None, engine: Engine, weigher: Weigher
) -> Callable[..., Any] | None:
    """Hang the hooks on the model, or with `count` on the loss; the loss to use from now on."""
    entry = _Entry(model, engine)
    if count is None:
        before = _RowsSent(weigher)
        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(_Weighed(entry, before), with_kwargs=True)
        return loss_fn
    counted = _Counted(entry, weigher, count)
    if loss_fn is None:
        model.register_forward_hook(_CountedModel(counted), with_kwargs=True)
        return None
    if isinstance(loss_fn, nn.Module):
        loss_fn.register_forward_hook(_CountedLoss(counted), with_kwargs=True)
        return loss_fn

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return counted(args, kwargs, loss_fn(*args, **kwargs))

    return wrapped


class _StaysBehind:
    """A hook that a copy or a pickle of its module leaves out."""

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


@final
class _Entry:
    """Backward comes into the model: open the engine's round if this backward will reach its parameters."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._engine = engine
        trainable = [p for p in model.parameters() if p.requires_grad]
        # Autograd makes a parameter's accumulator on first use and asks by node whether a backward will run it; a
        # torch.autograd.grad with respect to inputs (a gradient penalty) runs none of them, and sends nothing.
        self._accumulators: list[Any] = [p.view_as(p).grad_fn.next_functions[0][0] for p in trainable]  # type: ignore[union-attr]

    def enter(self, weight: Weight | None) -> float | None:
        if not any(torch._C._will_engine_execute_node(node) for node in self._accumulators):
            return None
        self._engine.begin()
        return None if weight is None else weight.value()


@final
class _RowsSent(_StaysBehind):
    def __init__(self, weigher: Weigher) -> None:
        self._weigher = weigher
        self.weight: Weight | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.weight = self._weigher.ask(rows((args, kwargs)), (args, kwargs))


@final
class _Weighed(_StaysBehind):
    def __init__(self, entry: _Entry, before: _RowsSent) -> None:
        self._entry, self._before = entry, before

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return scaled(output, functools.partial(self._entry.enter, self._before.weight))


@final
class _Counted:
    """Weighs a loss by its own count of terms."""

    def __init__(self, entry: _Entry, weigher: Weigher, count: Count) -> None:
        self._entry, self._weigher, self._count = entry, weigher, count

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> Any:
        if not torch.is_grad_enabled():
            return loss
        output, target = (*args, *kwargs.values())[:2]
        return self.weigh(output, target, loss)

    def weigh(self, output: Any, target: Any, loss: Any) -> Any:
        with torch.no_grad():
            count = float(self._count(output, target))
        return scaled(loss, functools.partial(self._entry.enter, self._weigher.ask(count, (output, target))))


@final
class _CountedLoss(_StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Any) -> Any:
        return self._counted(args, kwargs, loss)


@final
class _CountedModel(_StaysBehind):
    def __init__(self, counted: _Counted) -> None:
        self._counted = counted

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        called_with = kwargs if not args else (args[0] if len(args) == 1 and not kwargs else (args, kwargs))
        return self._counted.weigh(output, called_with, output)
