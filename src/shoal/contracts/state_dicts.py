"""Form of a feature's state in a checkpoint: tensors by parameter and by kind.

A checkpoint may hold anything, because any program may have written it. So a feature checks its
state before it takes any of it (`Attachment.problem`). Guarded by
tests/checkpoint/test_state_form.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def unlike_tensors(states: Any, flat: Iterable[str] = (), numbers: Iterable[str] = ()) -> str:
    """Say why a value is no `StateDict`; '' if it is one.

    Args:
        states: the value.
        flat: kinds that each parameter must have, as flat tensors.
        numbers: kinds that each parameter must have, as one number of at least 0.
    """
    if not isinstance(states, dict):
        return f"{type(states).__name__}, and not a dict by parameter"
    for name, of_kind in states.items():
        where = f"parameter {str(name)[:80]}"
        if not isinstance(name, str) or not isinstance(of_kind, dict):
            return f"{where} has no dict of tensors"
        if not all(isinstance(tensor, Tensor) for tensor in of_kind.values()):
            return f"{where} has values that are no tensors"
        for kind in flat:
            if kind not in of_kind or of_kind[kind].dim() != 1:
                return f"{where} has no flat tensor {kind}"
        for kind in numbers:
            if kind not in of_kind or not is_amount(of_kind[kind]):
                return f"{where} has no number {kind}"
    return ""


def is_amount(tensor: Tensor) -> bool:
    """Return whether a tensor is one finite number of at least 0."""
    return tensor.numel() == 1 and not tensor.is_complex() and 0 <= float(tensor) < math.inf
