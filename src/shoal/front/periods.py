"""`update_every`: layers that are updated once in so many steps. What is asked is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

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


def begin_momentum(
    update_every: Mapping[str, int], model: nn.Module, optimizers: Iterable[Optimizer]
) -> None:
    """Give layers that are updated later than others a momentum of 0, where a fused SGD has them.

    torch's kernel takes the momentum of all parameters of a group, or of none. One of 0 changes
    nothing, but for a dampening, which a first step leaves out.

    Raises:
        PlanError: there is a dampening.
    """
    modules = dict(model.named_modules())
    seldom = {
        p for name in update_every for p in modules.get(name, model).parameters(recurse=False)
    }
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            late = [p for p in group["params"] if p in seldom and not optimizer.state.get(p)]
            if not (isinstance(optimizer, SGD) and group["fused"] and group["momentum"] and late):
                continue
            if group["dampening"]:
                raise PlanError(
                    "a fused SGD with a dampening cannot begin with some parameters later than "
                    "with others (update_every)",
                    where=f"group {number} of the optimizer",
                    do="give SGD fused=False",
                )
            for parameter in late:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
