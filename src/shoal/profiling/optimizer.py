"""What the optimizers' step costs, measured on scratch copies: the real ones are not touched.

A step is almost all memory traffic, so its time grows with the number of elements: what does not
fit under the cap is scaled up from what does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.profiling.timeline import Clock
from shoal.profiling.updates import unhooked_step

# 64 MB of float32: beyond every cache, and still small beside a model's own memory
_MOST_ELEMENTS = 16_000_000
# over the parameters' bytes, where the step cannot be run: read and write w and one state, read g
_PASSES = 5


@dataclass(frozen=True)
class OptimizerCost:
    """What a step of some optimizers takes, and what they keep."""

    seconds: float
    state_bytes: float

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer]) -> OptimizerCost:
        """Of all of them together. All ranks call this at the same time."""
        costs = [_cost(optimizer) for optimizer in optimizers]
        return cls(sum(cost.seconds for cost in costs), sum(cost.state_bytes for cost in costs))


def _cost(optimizer: Optimizer) -> OptimizerCost:
    groups, share = _scratch(optimizer)
    tensors = [parameter for group in groups for parameter in group["params"]]
    if not tensors:
        return OptimizerCost(0.0, 0.0)
    clock = Clock(tensors[0].device)
    try:
        copy = type(optimizer)(groups, **_options(optimizer))
        measured, kept = clock.usual(partial(unhooked_step, copy)), copy.state.values()
    # it needs a closure, other arguments, sparse gradients … : whatever it is, its cost is memory
    except Exception:
        measured, kept = _PASSES * _copy_seconds(tensors, clock), optimizer.state.values()
    state_bytes = sum(
        value.nbytes for state in kept for value in state.values() if isinstance(value, Tensor)
    )
    return OptimizerCost(measured / share, state_bytes / share)


def _scratch(optimizer: Optimizer) -> tuple[list[dict[str, Any]], float]:
    """Its groups with copies for parameters, up to the cap, and the share that is copied."""
    left, copied, total = _MOST_ELEMENTS, 0, 0
    groups = []
    for group in optimizer.param_groups:
        copies = []
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            total += parameter.numel()
            if left > 0 and parameter.numel() > 0:
                copies.append(_copy(parameter, left))
                copied += copies[-1].numel()
                left -= copies[-1].numel()
        if copies:
            groups.append({**group, "params": copies})
    return groups, copied / max(total, 1)


def _copy(parameter: Tensor, most: int) -> Tensor:
    """A leaf like the parameter, with a gradient, cut to about `most` elements."""
    part = parameter.detach()
    if part.numel() > most:
        part = part[: max(1, most * part.shape[0] // part.numel())]
    copy = part.clone().requires_grad_()
    copy.grad = torch.rand_like(copy)
    return copy


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Those of its defaults that its constructor takes."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def _copy_seconds(tensors: list[Tensor], clock: Clock) -> float:
    """Seconds to pass over these tensors' bytes once, at the rate of a copy in memory."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    source = torch.zeros(max(nbytes, 1 << 20), dtype=torch.uint8, device=tensors[0].device)
    target = torch.zeros_like(source)
    return clock.usual(lambda: target.copy_(source)) * nbytes / source.numel()
