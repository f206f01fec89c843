"""Checks of the functions in `Parts`: each is a function, and takes the arguments that it gets.

A user may give a module or an optimizer in place of the function that makes it. Both can be called
as well, so without these checks the stage would start and fail on the executors, with an error of
PyTorch's.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError

# arguments of each field's function, and its result in words
_FORMS = {
    "model": ("", "the module"),
    "loss": ("", "the loss"),
    "optimizer": ("parameters", "the optimizer"),
    "to_input": ("features", "the model's input"),
    "to_batch": ("columns", "the batch"),
    "compute_loss": ("model, batch", "the loss of a batch"),
    "metric": ("output, target", "how many are right, and of how many"),
}


def check_function(field: str, value: Any) -> None:
    """Check that a field of `Parts` is a function of the right arguments.

    Raises:
        UsageError: it is an object, or takes other arguments.
    """
    arguments, _ = _FORMS[field]
    is_made = field in ("model", "loss", "optimizer")
    if is_made and isinstance(value, nn.Module | Optimizer):
        raise _refusal(field, f"an object: {type(value).__name__}", type(value).__name__ + "(…)")
    if not callable(value):
        raise _refusal(field, repr(value)[:80], "…")
    try:
        inspect.signature(value).bind(*filter(None, arguments.split(", ")))
    except TypeError as error:  # it takes other arguments
        name = getattr(value, "__name__", type(value).__name__)
        made = f"{name}(…)" if isinstance(value, type) else name if field == "loss" else "…"
        raise _refusal(field, f"{name}, called so: {error}", made) from error
    except ValueError:  # functions of C do not tell their arguments
        return


def check_made(field: str, value: Any) -> None:
    """Check that a function has made a module.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(value, nn.Module):
        raise UsageError(
            f"Parts({field}=…) made no module",
            got=type(value).__name__,
            expected="torch.nn.Module",
            do="return the module",
        )


def _refusal(field: str, got: str, made: str) -> UsageError:
    arguments, makes = _FORMS[field]
    return UsageError(
        f"Parts({field}=…) is a function that executors call",
        got=got,
        expected=f"a function of {arguments or 'no arguments'} that makes {makes}",
        do=f"{field}=lambda{' ' * bool(arguments)}{arguments}: {made}",
    )
