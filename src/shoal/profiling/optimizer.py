"""The cost of the optimizers' step, measured on scratch copies: the real ones are not touched.

A large step is almost all memory traffic, so its time grows with the number of elements. The part
under the cap is measured and scaled up. Few elements are copied several times: caches would hold
one copy from one measured step to the next, but in training they hold other data by then. The cost
of a parameter whatever its size is measured on parameters of one element.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.facts import UpdatePace
from shoal.core.rows import held_bytes, in_rows
from shoal.profiling.timeline import DeviceClock
from shoal.profiling.updates import step_without_hooks

# 32 MB of float32, as much of gradients, and state: larger than caches, small next to a model's own
_MOST_ELEMENTS = 8_000_000
# elements that, with gradients and state, exceed most caches; the most copies of each parameter
_LEAST_ELEMENTS, _MOST_TIMES = 4_000_000, 32
_MANY = 32  # parameters of one element
# times the parameters' bytes, if the step cannot be run: read and write w and one state, read g
_PASSES = 5


@dataclass(frozen=True)
class OptimizerCost:
    """Seconds of a step of some optimizers, and bytes of their state."""

    seconds: float
    state_bytes: float
    pace: UpdatePace  # the part of the seconds that does not depend on bytes

    @classmethod
    def of(
        cls, optimizers: Sequence[Optimizer], rows: Mapping[Tensor, int] | None = None
    ) -> OptimizerCost:
        """Measure all optimizers together. All ranks call this at the same time.

        `rows` gives the number of rows in each sparse gradient, by parameter.
        """
        costs = [_cost(optimizer, rows or {}) for optimizer in optimizers]
        counts = [len(_list_parameters(optimizer)) for optimizer in optimizers]
        seconds = sum(cost.seconds for cost in costs)
        call_s = sum(cost.pace.call_s for cost in costs)
        each_s = sum(
            cost.pace.parameter_s * count for cost, count in zip(costs, counts, strict=True)
        )
        pace = UpdatePace(call_s, each_s / max(sum(counts), 1))
        if call_s + each_s > seconds:
            pace = pace.times(seconds / (call_s + each_s))
        return cls(seconds, sum(cost.state_bytes for cost in costs), pace)


@dataclass(frozen=True)
class _Scratch:
    """Copies of an optimizer's groups, up to the cap."""

    groups: list[dict[str, Any]]
    share: float  # share of the copied elements among all that a step touches
    held: float  # share of the copied elements among all

    @classmethod
    def of(cls, optimizer: Optimizer, rows: Mapping[Tensor, int]) -> _Scratch:
        """Copy the parameters that train."""
        left = _MOST_ELEMENTS
        touched, all_touched, copied, total = 0, 0, 0, 0
        groups = []
        for group in optimizer.param_groups:
            copies = []
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                total += parameter.numel()
                all_touched += _count_touches(parameter, rows)
                if left > 0 and parameter.numel() > 0:
                    copies.append(_copy(parameter, left, rows.get(parameter)))
                    copied += copies[-1].numel()
                    touched += _count_touches(parameter, rows, copies[-1])
                    left -= copies[-1].numel()
            if copies:
                groups.append({**group, "params": copies})
        return cls(groups, touched / max(all_touched, 1), copied / max(total, 1))

    def several(self) -> _Scratch:
        """Return enough copies of all parameters to exceed caches."""
        numel = sum(p.numel() for group in self.groups for p in group["params"])
        times = min(_LEAST_ELEMENTS // max(numel, 1), _MOST_TIMES)
        if times < 2:
            return self
        groups = [
            {**group, "params": [*group["params"], *_again(group["params"], times - 1)]}
            for group in self.groups
        ]
        return _Scratch(groups, self.share * times, self.held * times)


def _count_touches(
    parameter: Tensor, rows: Mapping[Tensor, int], copy: Tensor | None = None
) -> int:
    """Count the elements that a step touches of a parameter, or of its copy."""
    whole = parameter if copy is None else copy
    if parameter not in rows:
        return whole.numel()
    return min(rows[parameter], len(whole)) * parameter.shape[1:].numel()


def _cost(optimizer: Optimizer, rows: Mapping[Tensor, int]) -> OptimizerCost:
    scratch = _Scratch.of(optimizer, rows).several()
    tensors = [parameter for group in scratch.groups for parameter in group["params"]]
    if not tensors:
        return OptimizerCost(0.0, 0.0, UpdatePace())
    clock = DeviceClock(tensors[0].device)
    try:
        copy = _like(optimizer, scratch.groups)
        measured, kept = clock.usual(partial(step_without_hooks, copy)), copy.state.values()
        pace = _pace(optimizer, rows, clock)
    # it may need a closure or other arguments: estimate the cost by memory traffic
    except Exception:
        measured, kept = _PASSES * _copy_seconds(tensors, clock), optimizer.state.values()
        pace = UpdatePace()
    state_bytes = sum(
        held_bytes(value) for state in kept for value in state.values() if isinstance(value, Tensor)
    )
    seconds = measured / scratch.share if scratch.share else 0.0
    return OptimizerCost(seconds, state_bytes / scratch.held, pace)


def _pace(optimizer: Optimizer, rows: Mapping[Tensor, int], clock: DeviceClock) -> UpdatePace:
    """Measure a step of one parameter of one element, and a step of many of them."""
    small = [
        (group, _element(parameter, parameter in rows))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.numel()
    ][:_MANY]

    def seconds(count: int) -> float:
        of_groups: dict[int, dict[str, Any]] = {}
        for group, parameter in small[:count]:
            copied = of_groups.setdefault(id(group), {**group, "params": []})
            copied["params"].append(parameter)
        return clock.usual(partial(step_without_hooks, _like(optimizer, [*of_groups.values()])))

    one_s = seconds(1)
    if len(small) < 2:
        return UpdatePace(one_s)
    parameter_s = max(0.0, seconds(len(small)) - one_s) / (len(small) - 1)
    return UpdatePace(max(0.0, one_s - parameter_s), parameter_s)


def _element(parameter: Tensor, sparse: bool) -> Tensor:
    """Make a leaf of as many dimensions as the parameter, with one element and a gradient."""
    element = torch.ones((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    return _copy(element, 1, 1 if sparse else None)


def _list_parameters(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters that it updates."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _like(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Make another optimizer of the same class and defaults, with these groups."""
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups, **_options(optimizer))
    return made


def _copy(parameter: Tensor, most: int, rows: int | None = None) -> Tensor:
    """Make a leaf like the parameter, with a gradient, cut to about `most` elements."""
    part = parameter.detach()
    if part.numel() > most:
        part = part[: max(1, most * part.shape[0] // part.numel())]
    copy = part.clone().requires_grad_()
    copy.grad = torch.rand_like(copy) if rows is None else _rows_of(copy.detach(), rows)
    return copy


def _again(copies: Sequence[Tensor], times: int) -> Iterator[Tensor]:
    """Yield so many more copies of each, with gradients of their own."""
    for copy in (copy for _ in range(times) for copy in copies):
        again = copy.detach().clone().requires_grad_()
        assert copy.grad is not None
        again.grad = copy.grad.clone()
        yield again


def _rows_of(table: Tensor, rows: int) -> Tensor:
    """Make a sparse gradient of so many rows, anywhere in a table."""
    places = torch.randperm(len(table), device=table.device)[:rows].sort().values
    values = torch.rand_like(table[: len(places)])
    return in_rows(places, values, table.shape, coalesced=True)


def _options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults that its constructor accepts."""
    accepted = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def _copy_seconds(tensors: list[Tensor], clock: DeviceClock) -> float:
    """Return the seconds of one pass over these tensors' bytes, at the rate of a copy in memory."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    source = torch.zeros(max(nbytes, 1 << 20), dtype=torch.uint8, device=tensors[0].device)
    target = torch.zeros_like(source)
    return clock.usual(lambda: target.copy_(source)) * nbytes / source.numel()
