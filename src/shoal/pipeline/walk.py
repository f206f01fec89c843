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
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

Position = tuple[float, ...]
Name = tuple[Position, int]
END = float("inf")  # the end of a frame, behind all events
STEP = 2.0**-20  # a step from one function to the next
HOOKS = -1.0  # a frame before all events of a call: that of its forward pre-hooks


class Walk(ABC):
    """One run of a model's forward, event by event."""

    def __init__(self) -> None:
        self._frames: list[list[Any]] = [[(), 0.0]]  # position, number of the last event
        self._aside = 0  # depth of calls that nobody walks into
        self._functions = _Functions(self)

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

    def walk_into(self, position: Position, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module's call, event by event.

        Forward pre-hooks have a frame of their own, so that they change no position when they come
        and go.
        """
        with self.inside(position):
            if not module._forward_pre_hooks or hasattr(module, "_orig_mod"):
                return eager_call(module)(module, *args, **kwargs)
            with self._pre_hooks(position, module):
                return eager_call(module)(module, *args, **kwargs)

    @contextmanager
    def _pre_hooks(self, position: Position, module: nn.Module) -> Iterator[None]:
        """Number events by a frame of their own, until the module's forward begins."""
        attributes, forward = vars(module), module.forward
        before = attributes.get("forward")
        frame = [(*position, HOOKS), 0.0]

        def end() -> None:
            if self._frames[-1] is frame:
                self._frames.pop()
            attributes.pop("forward", None)
            if before is not None:
                attributes["forward"] = before

        def began(*args: Any, **kwargs: Any) -> Any:
            end()
            return forward(*args, **kwargs)

        self._frames.append(frame)
        attributes["forward"] = began
        try:
            yield
        finally:
            end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let everything inside run as it is, without events."""
        is_top = torch.overrides._get_current_function_mode() is self._functions
        self._aside += 1
        if is_top:
            self._functions.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if is_top:
                self._functions.__enter__()  # type: ignore[no-untyped-call]
            self._aside -= 1

    @property
    def is_aside(self) -> bool:
        """Whether the running call has no events."""
        return self._aside > 0

    @abstractmethod
    def function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a torch function."""

    @abstractmethod
    def module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a call of a module."""

    def is_checkpointed(self) -> bool:
        """Return whether torch is to checkpoint the part that begins here."""
        return False

    def on_checkpoint_end(self, begin: Position) -> None:  # noqa: B027  # most need not know
        """Note where a function ends that torch.utils.checkpoint runs, and that began there."""

    def values(self, args: Any) -> Any:
        """Return the arguments with which torch runs a checkpoint."""
        return args

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward. Its frame is the first."""
        before, _LOCAL.walk = running_walk(), self
        try:
            with self._functions:
                return forward(*args, **kwargs)
        finally:
            _LOCAL.walk = before


@final
class _Functions(TorchFunctionMode):
    """Brings a thread's torch functions to a walk."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        # no circle: a replay has what its station has computed, and shall not wait for a collector
        self._walk = ref(walk)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        walk = self._walk()
        if walk is None or walk.is_aside or func in _OF_THREAD:
            return func(*args, **(kwargs or {}))
        return walk.function(func, args, kwargs or {})


# Settings of a thread are no events: a walk that ends within a context leaves it as it was.
_OF_THREAD = frozenset({torch._C._set_grad_enabled})
_LOCAL = threading.local()
_CALL = nn.Module.__call__
_NAME = "_checkpoint_without_reentrant_generator"
_CHECKPOINT, _REENTRANT = vars(checkpoints)[_NAME], checkpoints.CheckpointFunction
_LOCK = threading.Lock()
_USERS = 0  # users of the changed call


def running_walk() -> Walk | None:
    """Return the walk of this thread, if it is in one."""
    return getattr(_LOCAL, "walk", None)


def is_walking() -> bool:
    """Return whether this thread is in a walk."""
    return running_walk() is not None


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    walk = getattr(_LOCAL, "walk", None)
    if walk is None or walk.is_aside:
        return _CALL(module, *args, **kwargs)
    return walk.module(_CALL, module, args, kwargs)


def eager_call(module: nn.Module) -> Callable[..., Any]:
    """Return the call of a module, without torch.compile."""
    original = getattr(module, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return lambda _, *args, **kwargs: original(*args, **kwargs)
    return nn.Module._call_impl


def _checkpoint(function: Any, *settings: Any, **kwargs: Any) -> Any:
    """Begin a checkpoint that is not reentrant: a generator, which torch goes on with after it."""
    walk = running_walk()
    if walk is None or walk.is_aside or walk.is_checkpointed():
        return _CHECKPOINT(function, *settings, **kwargs)
    return _without_checks(walk)


def _without_checks(walk: Walk) -> Iterator[None]:
    begin = walk.here
    yield
    walk.on_checkpoint_end(begin)


class _Reentrant:
    """Torch's reentrant checkpoint, as far as a walk lets it."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        walk = running_walk()
        if walk is not None and walk.is_aside and not torch.is_grad_enabled():
            return function(*args)  # forms alone, of which torch would warn
        if walk is None or walk.is_aside:
            return _REENTRANT.apply(function, preserve, *args)
        if walk.is_checkpointed():
            return _REENTRANT.apply(function, preserve, *walk.values(args))
        begin = walk.here
        output = function(*args)
        walk.on_checkpoint_end(begin)
        return output


@contextmanager
def walking() -> Iterator[None]:
    """Let calls of modules reach the walk of their thread, inside.

    Torch has no hook that may take the place of a call. torch.fx sets the same attribute. A walk
    also says which checkpoints of torch's are made: none in which a station begins or ends.
    """
    global _USERS
    with _LOCK:
        _USERS += 1
        nn.Module.__call__ = _call  # type: ignore[method-assign]
        vars(checkpoints).update(CheckpointFunction=_Reentrant, **{_NAME: _checkpoint})
    try:
        yield
    finally:
        with _LOCK:
            _USERS -= 1
            if not _USERS:
                nn.Module.__call__ = _CALL  # type: ignore[method-assign]
                vars(checkpoints).update(CheckpointFunction=_REENTRANT, **{_NAME: _CHECKPOINT})
