"""Runs training steps on a model and leaves no trace: its state is the same, bit for bit.

It restores everything that the model, the loss, the sample and the optimizers' settings refer to
(traces.py), and the random state of torch, `random` and numpy. The cost is one copy of all this
while the steps run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.sample import Sample
from shoal.core.pieces import local_gradient
from shoal.core.random_state import RANDOM_STATE
from shoal.profiling.traces import Traces


@contextmanager
def without_traces(sample: Sample, optimizers: Sequence[Optimizer] = ()) -> Iterator[Sample]:
    """Put the sample's model and loss into training, without gradients, and back at the end.

    Gradients of all parameters in the optimizers are restored too, because the loss may use one.

    Ranks that are threads share the random state. So let all of them enter before one draws, and
    let all finish before one leaves.

    Returns:
        The sample to run. Its x and y are restored before each run.
    """
    settings = [
        value
        for optimizer in optimizers
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state")
    ]
    before = Traces(sample.model, sample.function, settings, [*map(type, optimizers)])
    batch = Traces(sample.x, sample.y)
    held = {p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    gradients = [
        (p, local_gradient(p)) for p in held.difference(before.leaves()) if type(p) is nn.Parameter
    ]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with _fork_rng(devices), torch.enable_grad():
            others = [parameter for parameter, _ in gradients]
            drop_gradients([*before.leaves(), *batch.leaves(), *others])
            # a model in training may keep single modules in eval on purpose
            if not sample.model.training:
                sample.model.train()
            yield replace(sample, renew=partial(batch.put_back, only_seen=True))
    finally:
        batch.put_back()
        before.put_back()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _fork_rng(devices: Iterable[int]) -> Iterator[None]:
    """Fork the random state as torch's fork_rng does. One rank at a time enters or leaves."""
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
