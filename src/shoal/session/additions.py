"""What a parallelised model itself has besides: `no_sync`, and what refuses wrappers around it.

DistributedDataParallel, DataParallel and FSDP would exchange its gradients a second time, or split
what is split already. They are refused

    as they are made    DistributedDataParallel reads `_ddp_params_and_buffers_to_ignore`
    in forward          where one was made before, or around a module that holds the model

A copy or a pickle of the model takes nothing of it along.
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
    """Put them on a model; without an engine its process is alone, and nothing is refused."""
    leaves_behind(type(model))
    if not hasattr(model, _NO_SYNC):  # else it is the user's own
        model.__dict__[_NO_SYNC] = _NoSync(engine)
    elif isinstance(before := model.__dict__.get(_NO_SYNC), _NoSync):  # until the first batch
        before.take(engine)
    if engine is not None:
        before = model.__dict__.get(_IGNORED)
        model.__dict__[_IGNORED] = _Refuses() if before is None else _RefusesTo(before)


def remove(model: nn.Module) -> None:
    """Take them off again."""
    if isinstance(model.__dict__.get(_NO_SYNC), _NoSync):
        del model.__dict__[_NO_SYNC]
    refuses = model.__dict__.get(_IGNORED)
    if isinstance(refuses, _Refuses):
        del model.__dict__[_IGNORED]
    elif isinstance(refuses, _RefusesTo):
        model.__dict__[_IGNORED] = refuses.before


def check_bare(model: nn.Module) -> None:
    """Raise UsageError where a wrapper of torch's calls a parallelised model."""
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(inner is model for inner in around.modules()):
        raise _refused("DistributedDataParallel")
    if "_is_replica" in model.__dict__:
        raise _refused("DataParallel")


def _refused(wrapper: str) -> UsageError:
    return UsageError(
        f"{wrapper} is around a model that is parallelised: both would exchange its gradients",
        do="train the model that parallelize has returned, without a wrapper: leave out "
        f"{wrapper}(model), accelerator.prepare(model) or the trainer's own strategy",
    )


@final
class _NoSync(StaysBehind):
    """`model.no_sync()`."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine = engine
        self._open: list[ExitStack] = []  # contexts without an engine yet

    def take(self, engine: Engine | None) -> None:
        """Send nothing by this engine from here on, also in contexts that are open."""
        self._engine = engine
        if engine is not None:
            for stack in self._open:
                stack.enter_context(engine.accumulating())

    def __call__(self) -> AbstractContextManager[None]:
        """Backwards inside send nothing; the next one outside sends the sum of all."""
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
    """Names for DistributedDataParallel, which may not be read."""

    def __iter__(self) -> Iterator[str]:
        raise _refused("DistributedDataParallel")


@final
class _RefusesTo:
    """The same, of a model that had names there.

    Args:
        before: these; copies have them.
    """

    def __init__(self, before: Any) -> None:
        self.before = before

    def __iter__(self) -> Iterator[str]:
        raise _refused("DistributedDataParallel")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return list, (list(self.before),)
