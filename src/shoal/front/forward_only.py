"""`parallelize(model, None, None, sample=(x, None))`: a model that is used, and not trained.

So a model that is too large for one rank gives features, or is evaluated, cut over the ranks. While
it is measured and planned, all parameters train: plans are made for training steps. Then each
parameter trains, or does not, as before. Guarded by tests/equivalence/test_forward_only.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal.contracts.batch import tensors_of
from shoal.contracts.strategy import Strategy
from shoal.core.registry import named
from shoal.front.options import AUTO, Options
from shoal.planner.options import known


def run_here(strategies: Iterable[str] | None) -> tuple[str, ...]:
    """Return the known ones of these strategies by which each rank runs all of its own calls."""
    return tuple(n for n in known(strategies) if not named(Strategy, n).role.names_ranks)


def for_use(options: Options) -> Options:
    """Return options for a model that is only used: every rank calls all of it."""
    usable = run_here(options.strategies)
    if options.plan != AUTO or options.compute_loss is not None or not usable:
        return options
    return replace(options, strategies=usable)


def mean_of_output(output: Any, target: Any) -> Tensor:
    """Return a loss that every part of an output contributes to."""
    means = [
        (tensor.real if tensor.is_complex() else tensor).mean()
        for tensor in tensors_of(output)
        if tensor.requires_grad
    ]
    return torch.stack(means).sum() if len(means) > 1 else means[0]


@contextmanager
def thaw_all(model: nn.Module) -> Iterator[Optimizer]:
    """Have all parameters train in the context. Return an optimizer that never steps."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)
    try:
        yield SGD([p for p, _ in before if p.requires_grad], lr=0.0)
    finally:
        for parameter, trained in before:
            parameter.requires_grad_(trained)
