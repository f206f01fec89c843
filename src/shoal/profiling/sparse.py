"""Gradients that are sparse tensors: their rows, and the time to sum them.

An embedding with `sparse=True` gives one, and so does any function that does. A gradient's kind is
seen as it lands (timeline.py). If the sample does not bring a gradient, its module tells the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.probe import Layer, MeasuredStep, Probe, Trial
from shoal.core.facts import Facts
from shoal.core.rows import in_rows
from shoal.profiling.timeline import DeviceClock
from shoal.profiling.untraced_runs import drop_gradients


@dataclass(frozen=True)
class SparseFacts(Facts):
    """Rows of a layer's sparse gradients, each counted once, and the time to sum them."""

    rows: int = 0
    own_s: float = 0.0  # seconds to add up this rank's rows, as autograd leaves them
    row_s: float = 0.0  # seconds for a row in the sum over all ranks


@final
class SparseProbe(Probe):
    """Counts the rows of sparse gradients, and times their sums."""

    def measure(self, layer: Layer, trial: Trial) -> SparseFacts:
        if not trial.step.sparse & layer.parameters.keys():
            return SparseFacts()
        gradients = trial.once(_gradients)
        found = [gradients[name] for name in layer.parameters if name in gradients]
        rows = sum(_num_rows(gradient) for gradient in found)
        clock = DeviceClock(next(iter(layer.parameters.values())).device)
        ranks = max(2, trial.ranks)

        def seconds() -> tuple[float, float]:
            own_s = sum(clock.usual(gradient.coalesce) for gradient in found)
            all_s = sum(clock.usual(_sum_of(gradient, ranks)) for gradient in found)
            return own_s, all_s / max(1, ranks * rows)

        name = f"sparse gradients of {layer.name}"
        return SparseFacts(rows, *trial.known.figure(name, tuple[float, float], seconds))


def says_sparse(module: nn.Module) -> bool:
    """Return whether a module says that its weight's gradient is a sparse tensor."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and bool(module.sparse)


def is_sparse(layer: Layer, parameter: str, step: MeasuredStep) -> bool:
    """Return whether a parameter's gradient is sparse, as the sample shows or its module says."""
    unused = parameter not in step.ready_s
    return parameter in step.sparse or (unused and says_sparse(layer.module))


def rows_of_gradients(trial: Trial) -> Mapping[Tensor, int]:
    """Count the rows in each sparse gradient of the sample, by parameter."""
    found = {
        name: parameter
        for layer in trial.layers
        for name, parameter in layer.parameters.items()
        if is_sparse(layer, name, trial.step)
    }
    gradients = trial.once(_gradients) if trial.step.sparse else {}
    return {p: _num_rows(gradients[n]) if n in gradients else 0 for n, p in found.items()}


def _gradients(trial: Trial) -> dict[str, Tensor]:
    """Return the sparse gradients of one more step, by the parameter's name."""
    parameters = {name: p for layer in trial.layers for name, p in layer.parameters.items()}
    trial.sample.backward(trial.sample.loss())
    gradients = {
        name: gradient
        for name, parameter in parameters.items()
        if (gradient := parameter.grad) is not None and gradient.layout is torch.sparse_coo
    }
    drop_gradients(trial.sample.model.parameters())
    return gradients


def _num_rows(gradient: Tensor) -> int:
    return len(gradient._indices()[0].unique())


def _sum_of(gradient: Tensor, ranks: int) -> Callable[[], object]:
    """Return a function that sums as many such gradients, each with every row once."""
    own = gradient.coalesce()
    ids, rows = own.indices()[0].repeat(ranks), torch.cat([own.values()] * ranks)
    return in_rows(ids, rows, own.shape).coalesce
