"""Replaces methods of an optimizer, and restores them.

The optimizer's class stays, so schedulers and scalers that hold the object call the new methods.
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
    """The methods that replace an optimizer's own.

    Args:
        optimizer: the optimizer with these methods.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._put: dict[str, tuple[Any, Any]] = {}  # values before and now, by name

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

        update_wrapper(replacement, original)  # keep a scheduler's mark on `step`
        declared = signature(original)  # a scaler looks for its arguments in the signature
        itself = Parameter("itself", Parameter.POSITIONAL_ONLY)
        # a scheduler's function around a replaced method has `itself` already
        others = [p for p in declared.parameters.values() if p.name != itself.name]
        replacement.__dict__["__signature__"] = declared.replace(parameters=[itself, *others])
        self.put(name, MethodType(replacement, self._optimizer))

    def refuse_copies(self) -> None:
        """Raise an error if the optimizer is copied or pickled."""
        self.put("__getstate__", _refuse_copy)

    def restore(self) -> None:
        """Restore the earlier attributes.

        If a method has been replaced again since, it stays, because it may call this one.
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
