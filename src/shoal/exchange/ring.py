"""Slices travel round a ring of neighbours: each rank talks to two others only, however many there are.

    step      0        1        2          P = 4, seen on rank r
    sends     r−1      r−2      r−3        reduce: a slice goes r+1, r+2, … and ends, summed, on its owner r
    receives  r−2      r−3      r
    sends     r        r−1      r−2        gather: and once more round
    receives  r−1      r−2      r−3

2·(P−1) steps. Each rank sends and receives 2·n·(P−1)/P bytes, to the byte as the slices fall; empty slices (fewer
elements than ranks) are sent by nobody and awaited by nobody. A slice is added in ring order, always the same.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from shoal.core.contracts import Bucket, Comm, SplitExchange
from shoal.core.cost import Traffic
from shoal.core.facts import Topology


@final
@dataclass(frozen=True)
class Ring(SplitExchange):
    """Reduce-scatter and all-gather among neighbours."""

    name: ClassVar[str] = "ring"

    def traffic(self, bucket: Bucket, topology: Topology) -> Traffic:
        """Every slice twice, save those a rank does not send (r, then r+1) or receive (r−1, then r)."""
        ranks, sizes = topology.size, bucket.slice_bytes(topology.size)
        twice = 2 * sum(sizes)
        sent = tuple(twice - sizes[r] - sizes[(r + 1) % ranks] for r in range(ranks))
        return Traffic(
            sent=sent,
            received=tuple(twice - sizes[r - 1] - sizes[r] for r in range(ranks)),
            rounds=2 * (ranks - 1) if bucket.numel else 0,
            leaving=tuple(sent[r] * topology.apart(r, (r + 1) % ranks) for r in range(ranks)),
        )

    def reduce_scatter(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Add up each slice on its way to its owner."""
        landed = torch.empty_like(max(slices, key=len))
        for step in range(comm.size - 1):
            outgoing = slices[(comm.rank - step - 1) % comm.size]
            incoming = slices[(comm.rank - step - 2) % comm.size]
            _pass_on(comm, outgoing, landed[: incoming.numel()])
            incoming.add_(landed[: incoming.numel()])

    def all_gather(self, slices: Sequence[Tensor], comm: Comm) -> None:
        """Send each summed slice once round."""
        for step in range(comm.size - 1):
            _pass_on(comm, slices[(comm.rank - step) % comm.size], slices[(comm.rank - step - 1) % comm.size])


def _pass_on(comm: Comm, outgoing: Tensor, incoming: Tensor) -> None:
    """One step: receive from the left while sending to the right."""
    pending = []
    if incoming.numel():
        pending.append(comm.receive(incoming, (comm.rank - 1) % comm.size))
    if outgoing.numel():
        pending.append(comm.send(outgoing, (comm.rank + 1) % comm.size))
    for each in pending:
        each.wait()
