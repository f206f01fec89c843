"""MiB a message. Guarded by tests/checkpoint/test_parts.py.

    every rank     posts a chunk of its part to each writer
    a writer       receives a chunk from every other rank; the first one then rests
    … until the parts are whole

All ranks go through the same tensors in the same order. The first writer rests three times as long
as the chunks took, so training keeps most of the link. Cost: each part crosses once to each writer,
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from shoal.checkpoint.tensors import bytes_of
from shoal.contracts.comm import Comm
from shoal.tensors.cut import SpreadCut

CHUNK_BYTES = 1 << 20
_REST = 3.0  # rest, as a multiple of the time that receiving took


@dataclass(frozen=True, eq=False)
class Spread:
    """A tensor of which every rank has a part."""

    part: Tensor  # this rank's part
    cut: SpreadCut

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole."""
        return self.cut.like.shape


@final
class Bringing:
    """Brings parts to their writers, one tensor after the other.

    Args:
        comm: a channel for this alone.
        writers: the ranks that write.
        spreads: tensors in the order in which all ranks go through them. Parts are contiguous.
    """

    def __init__(self, comm: Comm, writers: Sequence[int], spreads: Sequence[Spread]) -> None:
        self._comm, self._writers, self._left = comm, writers, list(spreads)

    def next(self) -> Tensor | None:
        """Bring the next tensor. Return the whole of it if this rank writes."""
        comm, spread = self._comm, self._left.pop(0)
        sizes = [spread.part.element_size() * numel for numel in spread.cut.numels()]
        own = bytes_of(spread.part)[: sizes[comm.rank]]  # of equal parts one rank sends its own
        writes = comm.rank in self._writers
        parts = {r: torch.empty(n, dtype=torch.uint8, device="cpu") for r, n in enumerate(sizes)}
        parts[comm.rank] = own
        for begin in range(0, max(sizes), CHUNK_BYTES):
            began_s = time.perf_counter()
            end = begin + CHUNK_BYTES
            receivers = [writer for writer in self._writers if writer != comm.rank]
            pending = [comm.send(own[begin:end], r) for r in receivers if begin < len(own)]
            if writes:
                pending += [
                    comm.receive(parts[rank][begin:end], rank)
                    for rank in comm.others
                    if begin < sizes[rank]
                ]
            for operation in pending:
                operation.wait()
            # other writers wait for the next chunk of the first one
            if comm.rank == self._writers[0]:
                time.sleep(_REST * (time.perf_counter() - began_s))
        if not writes:
            return None
        dtype = spread.part.dtype
        return spread.cut.joined([parts[rank].view(dtype) for rank in range(comm.size)])

    def rest(self) -> None:
        """Let the other ranks finish, if the remaining tensors cannot be written."""
        while self._left:
            self.next()
