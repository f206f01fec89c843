"""Additions to a parallelised model: `no_sync`, and a refusal of wrappers around it.

DistributedDataParallel, DataParallel and FSDP would exchange its gradients a second time, or split
the split model again. They are refused

    at construction     DistributedDataParallel reads `_ddp_params_and_buffers_to_ignore`
    in forward          if an earlier wrapper, or one around a module with the model inside, calls

A copy or a pickle of the model leaves the additions behind.
Guarded by tests/session/test_additions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import UsageError
from shoal.engine.engine import Engine
from shoal.strategies.copies import StaysBehind, leaves_behind

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_NO_SYNC = "no_sync"


def add(model: nn.Module, engine: Engine | None) -> None:
    """Put the additions on a model. Without an engine, in a lone process, nothing is refused."""
    leaves_behind(type(model))
    if not hasattr(model, _NO_SYNC):  # otherwise it is the user's own
        model.__dict__[_NO_SYNC] = _NoSync(engine)
    # a waiting one until the first batch
    elif isinstance(before := model.__dict__.get(_NO_SYNC), _NoSync):
        before.take(engine)
    if engine is not None:
        before = model.__dict__.get(_IGNORED)
        model.__dict__[_IGNORED] = _Refuses() if before is None else _RefusesTo(before)


def remove(model: nn.Module) -> None:
    """Take the additions off again."""
    if isinstance(model.__dict__.get(_NO_SYNC), _NoSync):
        del model.__dict__[_NO_SYNC]
    refuses = model.__dict__.get(_IGNORED)
    if isinstance(refuses, _Refuses):
        del model.__dict__[_IGNORED]
    elif isinstance(refuses, _RefusesTo):
        model.__dict__[_IGNORED] = refuses.before


def check_bare(model: nn.Module) -> None:
    """Raise UsageError if a wrapper of torch's calls a parallelised model."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(inner is model for inner in around.modules()):
        raise _refusal("DistributedDataParallel")
    if "_is_replica" in model.__dict__:
        raise _refusal("DataParallel")


def _refusal(wrapper: str) -> UsageError:
    return UsageError(
        f"{wrapper} is around a model that is parallelised: both would exchange its gradients",
        do="train the model that parallelize has returned, without a wrapper: leave out "
        f"{wrapper}(model), accelerator.prepare(model) or the trainer's own strategy",
    )


@final
class _NoSync(StaysBehind):
    """The `model.no_sync()` method."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self._open: list[ExitStack] = []  # contexts without an engine yet

    def take(self, engine: Engine | None) -> None:
        """Send nothing by this engine from now on, also in open contexts."""
        self._engine = engine
        if engine is not None:
            for stack in self._open:
                stack.enter_context(engine.accumulating())

    def __call__(self) -> AbstractContextManager[None]:
        """Send nothing in backwards inside. The next one outside sends the sum of all."""
        return self._waiting() if self._engine is None else self._engine.accumulating()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._open.append(stack)
            try:
                yield
            finally:
                self._open.remove(stack)


@final
class _Refuses(StaysBehind):
    """Names that DistributedDataParallel must not read: an iteration raises."""

    def __iter__(self) -> Iterator[str]:
        raise _refusal("DistributedDataParallel")


@final
class _RefusesTo:
    """Names that must not be read, on a model that had names of its own there.

    Args:
        before: the model's own names, which copies keep.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    def __iter__(self) -> Iterator[str]:
        raise _refusal("DistributedDataParallel")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return list, (list(self.before),)
