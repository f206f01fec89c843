"""Puts methods in the place of an optimizer's own, whose class stays: schedulers and scalers that
hold it meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import Parameter, signature
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from shoal.core.errors import UsageError


class Serves(Protocol):
    """Who has the state of some of an optimizer's parameters, and a part in their step."""

    def take_state(self) -> None:
        """Take what the optimizer holds of them."""

    def check_sent(self) -> None:
        """Raise UsageError where gradients are only this rank's own."""

    def open(self) -> None:
        """Before the original step."""

    def close(self) -> None:
        """After it, or in its place where it was not reached; more than once does no harm."""

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state in one-process form."""

    def load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """Take a state in one-process form."""


def serve(optimizer: Optimizer, by: Serves) -> None:
    """Have an optimizer hand over its state and do by other methods what they serve."""
    by.take_state()
    _replace(optimizer, "step", partial(_step, optimizer, by))
    _replace(optimizer, "state_dict", by.state_dict)
    _replace(optimizer, "load_state_dict", by.load_state_dict)
    optimizer.__dict__["__getstate__"] = _refuse_copy


def _step(
    optimizer: Optimizer,
    by: Serves,
    original: Callable[[], Any],
    closure: Callable[[], Any] | None = None,
) -> Any:
    """The closure; the hooks that users have put before a step; `by` opens, the original, `by`
    closes; hooks behind.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    by.check_sent()
    deep = 0  # a step that calls its base class's runs the hooks of both

    def enter(*_: object) -> None:
        nonlocal deep
        deep += 1
        if deep == 1:
            by.open()

    def leave(*_: object) -> None:
        nonlocal deep
        deep -= 1
        if deep == 0:
            by.close()

    last = optimizer.register_step_pre_hook(enter)  # hooks before it may clip, or edit groups
    first = optimizer.register_step_post_hook(leave)
    hooks = optimizer._optimizer_step_post_hooks
    # behind it, in their order
    hooks.update({key: hooks.pop(key) for key in list(hooks) if key != first.id})
    try:
        result = original()
    finally:
        by.close()
        first.remove()
        last.remove()
    return result if closure is None else loss


def _replace(optimizer: Optimizer, name: str, method: Callable[..., Any]) -> None:
    """Put `method(original, *args)` in a method's place: bound, as torch's schedulers expect."""
    original = getattr(optimizer, name)

    def replacement(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    update_wrapper(replacement, original)  # a scheduler's mark on `step` is taken along
    its = signature(original)  # a scaler looks for its arguments in it
    itself = Parameter("itself", Parameter.POSITIONAL_ONLY)
    replacement.__dict__["__signature__"] = its.replace(
        parameters=[itself, *its.parameters.values()]
    )
    optimizer.__dict__[name] = MethodType(replacement, optimizer)


def _refuse_copy() -> None:
    raise UsageError(
        "this optimizer's state is with its owners, so a copy or pickle of it would lose it",
        do="save optimizer.state_dict(), called on every rank, and load it into a new optimizer",
    )
