"""parallelize within modes that a program has set around it: training behind it is that of one
process, and what is measured knows nothing of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using

OF_THREADS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


OF_PROCESSES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
}


def trained(model: nn.Module, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


def check(around: Callable[[], AbstractContextManager[Any]]) -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(8, 6, generator=drawn, dtype=torch.float64)
    y = torch.arange(8) % 3
    alone = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    models = [copy.deepcopy(alone) for _ in range(2)]
    want = trained(alone, F.cross_entropy, torch.optim.Adam(alone.parameters()), x, y)

    def work(comm: ThreadComm) -> list[Tensor]:
        model, own = models[comm.rank], slice(4 * comm.rank, 4 * comm.rank + 4)
        optimizer: Any = torch.optim.Adam(model.parameters())
        pins = {"0": "factor", "2": "sliced"}
        loss_fn: Any = F.cross_entropy
        with using(comm):  # which measures the links
            with around():
                model, loss_fn, optimizer = shoal.parallelize(
                    model, loss_fn, optimizer, sample=(x[own], y[own]), codecs="all", pins=pins
                )
            return trained(model, loss_fn, optimizer, x[own], y[own])

    for got in run(2, work):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def quick_first(modes: Iterable[str], quick: str) -> list[Any]:
    """Mark all but one of them slow, because each measures the links."""
    return [m if m == quick else pytest.param(m, marks=pytest.mark.slow) for m in modes]


@pytest.mark.parametrize("mode", quick_first(OF_THREADS, "autocast"))
def test_modes_of_the_calling_thread(mode: str) -> None:
    check(OF_THREADS[mode])


@pytest.mark.parametrize("mode", quick_first(OF_PROCESSES, "float64"))
def test_modes_of_the_process(mode: str) -> None:
    with OF_PROCESSES[mode]():
        check(nullcontext)
