"""The schedulers of an optimizer, to name them if ranks' learning rates have come to differ.

An optimizer does not know its schedulers. Only an error needs them, so they are looked for among
all objects of the process, once it is known that learning rates differ. Learning rates are what
ranks compare: a scheduler that differs changes nothing before they do.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def scheduler_states(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the numbers that the schedulers of some optimizers have, by name."""
    found: dict[str, str] = {}
    for scheduler in gc.get_objects():
        if not issubclass(type(scheduler), LRScheduler):
            continue
        if any(getattr(scheduler, "optimizer", None) is optimizer for optimizer in optimizers):
            for name, value in vars(scheduler).items():
                if isinstance(value, int | float) and not name.startswith("_"):
                    found[f"{type(scheduler).__name__}.{name}"] = repr(value)
    return found


def first_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the name of the first number that two ranks' schedulers do not have alike."""
    return next((name for name in one if name in other and one[name] != other[name]), None)
