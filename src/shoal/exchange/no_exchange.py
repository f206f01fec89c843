"""Exchanges nothing: each rank keeps its own gradients.

Shows how fast a step would be if the network were free.

Steps 0, bytes 0. The result is not the sum (`exact` is False), so the planner never chooses it by
itself.

Source: the `noop_hook` of PyTorch's DDP, made for the same measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, Exchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology


@final
@dataclass(frozen=True)
class Nothing(Exchange):
    """No messages at all."""

    name: ClassVar[str] = "nothing"
    exact: ClassVar[bool] = False

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Nothing on any rank."""
        none = (0.0,) * topology.size
        return Traffic(sent=none, received=none, rounds=0)

    def reduce(self, flat: Tensor, comm: Comm) -> None:
        """Leave everything as it is."""

    def gather(self, flat: Tensor, comm: Comm) -> None:
        """Leave everything as it is."""
