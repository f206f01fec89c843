"""Uneven rows: how much each rank's loss weighs in the global mean.

The loss is a mean over local rows and gradients are averaged over ranks, so a rank with K rows of ΣK weighs K·P/ΣK. The
counts cross the network (24 bytes to each peer) while forward runs; the weight multiplies the gradient where backward
enters the model, so that accumulating several backwards stays exact. With equal counts nothing is multiplied. The first
message carries a digest of the batch too: ranks that all feed the same rows are a mistake that nothing else would show.
"""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.contracts import Comm
from shoal.core.errors import RanksDiffer
from shoal.profiling.identity import content
from shoal.runtime.lanes import Errand, Lane

OPAQUE = (nn.Module, type, ModuleType)  # what inputs and outputs may refer to, but are not made of
DEPTH = 3  # objects within objects


@final
class Weigher:
    """Exchanges row counts over a channel of its own; without one, every rank weighs the same."""

    def __init__(self, comm: Comm | None) -> None:
        self._comm = comm
        self._lane = None if comm is None else Lane(comm, "row counts")
        self._asked = 0

    def ask(self, count: float, batch: Any = None) -> Weight:
        """Start the exchange of this rank's count; with the first also that the batches (anything with tensors) differ.

        Raises:
            RanksDiffer: every rank was fed the same batch.
        """
        if self._comm is None or self._lane is None:
            return Weight(None, [], 0, "")
        self._lane.reached(f"forward {self._asked}")
        first = self._asked == 0 and bool(_tensors(batch))
        mine = torch.tensor([count, *(_digest(batch) if first else (0, 0))], dtype=torch.float64)
        counts = [torch.empty_like(mine) for _ in range(self._comm.size)]
        errand = self._lane.run(lambda comm: comm.all_gather(counts, mine), "row counts")
        weight = Weight(errand, counts, self._comm.rank, f"forward {self._asked}, row counts")
        self._asked += 1
        if first and weight.same_batch():
            raise RanksDiffer(
                f"all {self._comm.size} ranks were fed the same batch, so every rank would compute the same gradients",
                where="the first forward",
                do="wrap the loader on every rank: loader = shoal.shard(loader)",
            )
        return weight

    def close(self) -> None:
        """End the lane."""
        if self._lane is not None:
            self._lane.close()


@final
class Weight:
    """This rank's weight in the global mean, known once every rank's count has come (1 where none is asked for)."""

    def __init__(self, errand: Errand | None, counts: list[Tensor], rank: int, where: str) -> None:
        self._errand, self._counts, self._rank, self._where = errand, counts, rank, where

    def value(self) -> float | None:
        """K·P/ΣK, or None where every rank counts the same. Waits for the counts."""
        counts = self._arrived(0)
        if len(set(counts)) <= 1:
            return None
        return counts[self._rank] * len(counts) / sum(counts)

    def same_batch(self) -> bool:
        """Whether every rank's digest is the same. Waits for the counts."""
        digests = set(zip(self._arrived(1), self._arrived(2), strict=True))
        return len(digests) == 1 and digests != {(0.0, 0.0)}

    def _arrived(self, column: int) -> list[float]:
        if self._errand is not None:
            self._errand.wait(self._where)
        return [float(count[column]) for count in self._counts]


def rows(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one (1 where there is none)."""
    return next((len(leaf) for leaf in _tensors(batch) if leaf.dim()), 1)


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors in containers; where there are none, those in the attributes of objects."""
    seen: set[int] = set()
    level = [batch]
    for _ in range(1 + DEPTH):
        leaves = [leaf for value in level for leaf in pytree.tree_leaves(value)]
        if found := [leaf for leaf in leaves if isinstance(leaf, Tensor)]:
            return found
        objects = {id(leaf): leaf for leaf in leaves if hasattr(leaf, "__dict__") and not isinstance(leaf, OPAQUE)}
        level = [vars(leaf) for number, leaf in objects.items() if number not in seen]
        seen |= objects.keys()
    return []


def _digest(batch: Any) -> tuple[int, int]:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        digest.update(content(tensor))
    high, low = digest.digest()[:4], digest.digest()[4:]
    return int.from_bytes(high, "big"), int.from_bytes(low, "big")
