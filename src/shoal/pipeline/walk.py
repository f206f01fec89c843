"""A walk through a model's forward: which module calls and functions run, in which order.

An event is a call of a module, or of a torch function that returns tensors. Its position is a
tuple: its number in the frame that calls it, behind the position of that frame. Calls of modules
have whole numbers, and functions have the fractions between. So a mask that is made by one function
more for some inputs changes no position of a layer.

    model                      frame ()
      embed(ids)               (1,)
      blocks[0](x)             (2,)       a frame of its own if it is walked into
        norm(x)                (2, 1)
        x + attention(…)       (2, 2) the attention, (2, 2 + STEP) the sum
      head(x)                  (3,)

Positions compare as the events follow one another. A value's name is the position of the event that
has returned it last, and its number among the tensors that were returned.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Position = tuple[float, ...]
Name = tuple[Position, int]
END = float("inf")  # behind all events of a frame
STEP = 2.0**-20  # from one function to the next


class Walk(ABC):
    """One run of a model's forward, event by event."""

    def __init__(self) -> None:
        self._frames: list[list[Any]] = [[(), 0.0]]  # position, number of the last event
        self._aside = 0  # depth of calls that nobody walks into

    @property
    def here(self) -> Position:
        """The position of the next function."""
        position, number = self._frames[-1]
        return (*position, number + STEP)

    def passed(self) -> None:
        """Count a function in the running frame."""
        self._frames[-1][1] += STEP

    def called(self) -> Position:
        """Count a call of a module in the running frame, and return its position."""
        position, number = self._frames[-1]
        self._frames[-1][1] = number // 1 + 1
        return (*position, number // 1 + 1)

    @contextmanager
    def inside(self, position: Position) -> Iterator[None]:
        """Walk into a module's call."""
        self._frames.append([position, 0.0])
        try:
            yield
        finally:
            self._frames.pop()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let what is called inside run as it is, without events."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    @property
    def is_aside(self) -> bool:
        """Whether what runs has no events."""
        return self._aside > 0

    @abstractmethod
    def function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function."""

    @abstractmethod
    def module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call of a module."""

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward, whose frame is the first."""
        before, _LOCAL.walk = _walk(), self
        try:
            with _Functions(self):
                return forward(*args, **kwargs)
        finally:
            _LOCAL.walk = before


@final
class _Functions(TorchFunctionMode):
    """Brings a thread's torch functions to a walk."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self._walk = walk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a forward that is left inside of torch.no_grad() takes its mode back
        if self._walk.is_aside or func is torch._C._set_grad_enabled:
            return func(*args, **(kwargs or {}))
        return self._walk.function(func, args, kwargs or {})


_LOCAL = threading.local()
_CALL = nn.Module.__call__
_LOCK = threading.Lock()
_USERS = 0  # of the changed call


def _walk() -> Walk | None:
    return getattr(_LOCAL, "walk", None)


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    walk = getattr(_LOCAL, "walk", None)
    if walk is None or walk.is_aside:
        return _CALL(module, *args, **kwargs)
    return walk.module(_CALL, module, args, kwargs)


@contextmanager
def walking() -> Iterator[None]:
    """Let calls of modules reach the walk of their thread, inside.

    Torch has no hook that may take the place of a call. torch.fx sets the same attribute.
    """
    global _USERS
    with _LOCK:
        _USERS += 1
        nn.Module.__call__ = _called  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _LOCK:
            _USERS -= 1
            if not _USERS:
                nn.Module.__call__ = _CALL  # type: ignore[method-assign]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a tree of values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
