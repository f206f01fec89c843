"""Runs training steps on a model and leaves no trace: its state is the same, bit for bit.

Held: parameters and buffers (values and objects), `.grad` (the same objects), modules' plain
attributes and training mode, and the random state of torch, `random` and numpy. Not held: what a
module changes inside its own lists and dicts. Costs one copy of the parameters and buffers for as
long as it lasts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.contracts.sample import Sample
from shoal.profiling.identity import content

# The process has one random state, and ranks may be its threads. Two threads that read torch's at
# once can lock each other out for good, since torch takes the generator's lock while it holds
# Python's.
RANDOM_STATE = threading.Lock()


@contextmanager
def untraced(sample: Sample, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Put the sample's model and loss into training, without gradients, and back at the end.

    The gradients of `others` are put back too: parameters that a loss knows by itself.

    Threads that are ranks share the random state: let all of them enter before one draws, and all
    finish before one leaves.
    """
    modules = list(sample.model.modules())
    if isinstance(sample.loss_fn, nn.Module):
        modules += sample.loss_fn.modules()
    attributes = [(module, dict(vars(module))) for module in modules]
    tables: list[dict[str, Any]] = [table for m in modules for table in (m._parameters, m._buffers)]
    members = [(table, dict(table)) for table in tables]
    tensors = {id(t): t for _, table in members for t in table.values() if t is not None}
    values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    found = [*tensors.values(), *sample.tensors(), *others]
    leaves = [tensor for tensor in found if tensor.is_leaf]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with _forked(devices), torch.enable_grad():
            drop_gradients(leaves)
            # a model in training may have single modules in eval on purpose
            if not sample.model.training:
                sample.model.train()
            yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for table, entries in members:
            table.clear()
            table.update(entries)
        with torch.no_grad():
            for tensor, value in values:
                if not _equal(tensor, value):  # an expanded buffer cannot be written, and never was
                    tensor.copy_(value)
        for leaf, gradient in gradients:
            leaf.grad = gradient
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.layout is torch.strided:
        return torch.equal(a, b)
    return a.shape == b.shape and bool(content(a) == content(b))  # torch compares no sparse ones


@contextmanager
def _forked(devices: Iterable[int]) -> Iterator[None]:
    """torch's fork_rng, its beginning and end one rank at a time."""
    fork = torch.random.fork_rng(devices=devices)
    with RANDOM_STATE:
        fork.__enter__()
    try:
        yield
    finally:
        with RANDOM_STATE:
            fork.__exit__(None, None, None)


def drop_gradients(leaves: Iterable[Tensor]) -> None:
    """Set every gradient to None, as `zero_grad` does."""
    for leaf in leaves:
        leaf.grad = None
