"""`update_every`: layers that are updated once in so many steps. What is asked is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import PlanError
from shoal.core.names import matched
from shoal.core.plan import check_periods


def check_update_every(
    update_every: Any, names: Sequence[str], *, local_steps: Any, staleness: int | None
) -> None:
    """Refuse periods of no layer, or of no steps, and what they do not go with."""
    if update_every is None:
        return
    periods_of(update_every, names)
    for given, name in ((local_steps is not None, "local_steps"), (staleness != 0, "a staleness")):
        if given and update_every:
            raise PlanError(
                f"update_every and {name} do not go together: periods are of ranks that keep step",
                do="leave out one of them",
            )


def periods_of(update_every: Mapping[str, int] | None, names: Sequence[str]) -> dict[str, int]:
    """Steps by the layer's name, of those that are not updated in each; a later pattern wins.

    Args:
        update_every: by dotted layer name or glob.
        names: of the layers with trainable parameters.

    Raises:
        PlanError: a pattern matches none of them, or the steps are none.
    """
    if update_every is None:
        return {}
    check_periods(update_every, "parallelize")
    periods: dict[str, int] = {}
    for pattern, every in update_every.items():
        periods |= dict.fromkeys(matched(pattern, names, "update_every of", "layer"), every)
    return {name: every for name, every in periods.items() if every > 1}
