"""Puts methods in the place of an optimizer's own, and the own ones back.

The optimizer's class stays, so schedulers and scalers that hold the object meet the new methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from inspect import Parameter, signature
from types import MethodType
from typing import Any, final

from torch.optim import Optimizer

from shoal.core.errors import UsageError

_ABSENT = object()


@final
class Methods:
    """What an optimizer has in place of its own methods.

    Args:
        optimizer: whose methods they are.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._put: dict[str, tuple[Any, Any]] = {}  # by name: before, and now

    def put(self, name: str, value: Any) -> None:
        """Set an attribute of the object."""
        own = self._optimizer.__dict__
        self._put[name] = own.get(name, _ABSENT), value
        own[name] = value

    def replace(self, name: str, method: Callable[..., Any]) -> None:
        """Put `method(original, *args)` in a method's place.

        It is bound, as torch's schedulers expect.
        """
        original = getattr(self._optimizer, name)

        def replacement(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        update_wrapper(replacement, original)  # a scheduler's mark on `step` is taken along
        declared = signature(original)  # a scaler looks for its arguments in it
        itself = Parameter("itself", Parameter.POSITIONAL_ONLY)
        # a scheduler's function around a replaced method has it already
        others = [p for p in declared.parameters.values() if p.name != itself.name]
        replacement.__dict__["__signature__"] = declared.replace(parameters=[itself, *others])
        self.put(name, MethodType(replacement, self._optimizer))

    def refuse_copies(self) -> None:
        """Let a copy or a pickle of the optimizer be an error."""
        self.put("__getstate__", _refuse_copy)

    def restore(self) -> None:
        """Put back what was there.

        A method that somebody else has replaced since stays, as it may call the one from here.
        """
        own = self._optimizer.__dict__
        for name, (before, value) in self._put.items():
            if own.get(name) is not value:
                continue
            if before is _ABSENT:
                del own[name]
            else:
                own[name] = before
        self._put.clear()


def _refuse_copy() -> None:
    raise UsageError(
        "this optimizer's state is with its owners, so a copy or pickle of it would lose it",
        do="save optimizer.state_dict(), called on every rank, and load it into a new optimizer",
    )
