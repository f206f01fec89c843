"""Checks periods: numbers of steps from one update of a layer to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import PlanError

MOST_STEPS = 512  # longest period: a sum in 16 bits can count this many shares


def check_periods(update_every: Any, source: str) -> None:
    """Raise PlanError unless the value maps names to numbers of steps."""
    form = 'write for instance {"classifier.*": 4}'
    if not isinstance(update_every, Mapping):
        raise PlanError(
            f"{source}: update_every is not a mapping from layers to steps",
            got=repr(update_every)[:80],
            do=form,
        )
    for pattern, every in update_every.items():
        if not isinstance(pattern, str):
            raise PlanError(
                f"{source}: update_every is by the name of a layer, or a glob",
                got=repr(pattern)[:80],
                do=form,
            )
        if type(every) is not int or not 1 <= every <= MOST_STEPS:
            raise PlanError(
                f"{source}: the update period of {pattern!r} is no number of steps",
                got=repr(every)[:80],
                expected=f"a whole number from 1 to {MOST_STEPS}",
                do=form,
            )
