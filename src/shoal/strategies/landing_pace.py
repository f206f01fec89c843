"""Measures the main thread's time for each gradient that lands, apart from its bytes.

Autograd calls a hook, which brings the gradient to its place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Round, Rounds, Transfer
from shoal.exchange.no_exchange import Nothing
from shoal.strategies.replicate import BucketTransfer

_PARAMETERS, _NUMEL, _TIMES = 8, 64, 25  # so small that bytes cost nothing
# Numbers that are computed between two gradients. They evict the hook's data from the caches,
# as a layer does.
_BETWEEN = 1 << 16


def probe_landing(comm: Comm, device: torch.device) -> float:
    """Measure the main thread's processor seconds for each gradient that lands in a bucket.

    Args:
        comm: the ranks, which all call this at once.
        device: the gradients' device.

    Returns:
        The slowest rank's time, the same number on every rank. The time of an empty hook is
        subtracted, because profiled steps have such hooks too.
    """
    ours, plain = (
        [
            nn.Parameter(torch.zeros(_NUMEL, dtype=torch.float32, device=device))
            for _ in range(_PARAMETERS)
        ]
        for _ in range(2)
    )
    between = torch.ones(_BETWEEN, dtype=torch.float32, device=device)
    named = {str(number): parameter for number, parameter in enumerate(ours)}
    transfer = BucketTransfer(named, Nothing(), comm.size, "a probe")
    transfer.connect(_NoRounds())
    for parameter in plain:
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    comm.gather_objects(None, "measuring the links: gradients that land")
    more_s = []
    for _ in range(_TIMES):
        more_s.append(_backward_s(ours, between) - _backward_s(plain, between))
        transfer.publish()
    ranks: list[float] = comm.gather_objects(
        max(0.0, median(more_s)) / _PARAMETERS, "measuring the links: gradients that land"
    )
    return max(ranks)


def _backward_s(parameters: Sequence[nn.Parameter], between: Tensor) -> float:
    """Return the seconds of a backward that gives each parameter a gradient, with other work."""
    total = torch.zeros((), dtype=torch.float32, device=between.device)
    for parameter in parameters:
        parameter.grad = None
        total = total + (between * (total + parameter.sum())).mean()
    # another thread may use the core meanwhile; on a GPU another thread calls the hooks
    now = time.thread_time if between.device.type == "cpu" else time.perf_counter
    begin_s = now()
    torch.autograd.backward(total)
    return now() - begin_s


@final
class _NoRounds(Rounds):
    """Rounds that send nothing."""

    def current(self) -> Round:
        return _NO_ROUND


@final
class _NoRound(Round):
    accumulating = False

    @property
    def share(self) -> float:
        return 1.0

    def ready(self, transfer: Transfer) -> None:
        """Send nothing."""

    def make_room(self, transfer: Transfer) -> None:
        """Do nothing, because there is always room."""


_NO_ROUND = _NoRound()
