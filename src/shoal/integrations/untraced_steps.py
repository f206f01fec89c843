"""Steps of a trainer that leave no trace, as they are no steps of the training.

The measurement of the first batch puts all back that a step changes, but for settings of optimizers
(profiling/untraced_runs.py). Its steps must not log, because logs may wait for other ranks. Costs
nothing in training. Guarded by tests/trainers/test_lightning.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_OWN = frozenset(vars(nn.Module()))  # attributes that torch itself gives a module


@contextmanager
def silent(module: nn.Module, logs: type[nn.Module]) -> Iterator[None]:
    """Let `log` do nothing in all modules of a class, and put `requires_grad` back behind.

    A measured step may fail between `toggle_optimizer` and its end, as batch norm does on one row.
    """
    parts = [part for part in module.modules() if isinstance(part, logs)]
    with torch._C.DisableTorchFunction():  # a measurement sees who reads a parameter
        trains = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    for part in parts:
        vars(part)["log"] = _log_nothing
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("log", None)
        with torch._C.DisableTorchFunction():
            for parameter, does in trains:
                parameter.requires_grad_(does)


@contextmanager
def unseen(module: nn.Module, logs: type[nn.Module]) -> Iterator[None]:
    """Let a step leave no trace: it logs nothing, and plain attributes are put back behind it.

    Plain attributes are numbers, lists and the states of metrics, but no parameters, buffers and
    modules.

    Args:
        module: the model, with all modules in it.
        logs: class of modules that log. Meanwhile their `log` does nothing.
    """
    kept = [(part, _attributes(part)) for part in module.modules()]
    before = [(part, names, _contents(names.values())) for part, names in kept]
    try:
        with silent(module, logs):
            yield
    finally:
        for part, names, contents in before:
            for name in _attributes(part).keys() - names.keys():
                del vars(part)[name]
            vars(part).update(names)
            for put_back in contents:
                put_back()


@contextmanager
def still(optimizers: Iterable[Optimizer], things: Iterable[Any]) -> Iterator[None]:
    """Put settings of optimizers, and attributes of things such as schedulers, back behind a step.

    Args:
        optimizers: optimizers, of which only the settings of groups are put back.
        things: any objects.
    """
    settings = [
        (group, {name: value for name, value in group.items() if name != "params"})
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    attributes = [(thing, dict(vars(thing))) for thing in things]
    try:
        yield
    finally:
        for group, options in settings:
            group.update(options)
        for thing, before in attributes:
            vars(thing).update(before)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _contents(values: Iterable[Any]) -> list[Callable[[], None]]:
    """Return functions that put the contents of values back, if these can change in place."""
    return [put_back for value in values if (put_back := _content(value)) is not None]


def _content(value: Any) -> Callable[[], None] | None:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        tensor, data = value, value.detach().clone()

        def copy_back() -> None:
            with torch.no_grad():
                tensor.copy_(data)

        return copy_back
    if type(value) in (list, dict, set, deque):
        container, items = value, copy(value)

        def refill() -> None:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(items)

        return refill
    return None


def _log_nothing(*_: object, **__: object) -> None:
    return
