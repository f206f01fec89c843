"""Memory of the buckets that gradients and parameters travel in: kept by each, or there only while it is in use.

    fast   a bucket has its memory from the start
    low    `open` gives it memory and `close` takes it back: the allocator reuses it for the next bucket

The tensor and its views stay the same objects: only the storage under them is resized. A view must not be read while
it is closed: torch does not check.
Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, section 4.3.
"""

from __future__ import annotations

from threading import Lock
from typing import final

import torch
from torch import Tensor

MEMORY = ("fast", "low")


@final
class Buckets:
    """The flat tensors of one model's buckets, and how many bytes of them there are. Lanes and backward share it."""

    def __init__(self, memory: str = MEMORY[0]) -> None:
        self.freed = memory == "low"
        self.live = 0  # buckets that have memory
        self.live_bytes = self.peak_bytes = 0
        self._lock = Lock()

    def flat(self, numel: int, like: Tensor) -> Tensor:
        """A new flat tensor of zeros, open. Make its views, then close it."""
        flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        self._count(+1, flat.nbytes)
        return flat

    def open(self, flat: Tensor) -> None:
        """See that it has memory, whatever is in it."""
        storage = flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(flat.nbytes)
            self._count(+1, flat.nbytes)

    def close(self, flat: Tensor) -> None:
        """It is not in use: neither here, nor by a message under way."""
        if self.freed:
            flat.untyped_storage().resize_(0)
            self._count(-1, -flat.nbytes)

    def _count(self, buckets: int, nbytes: int) -> None:
        with self._lock:
            self.live += buckets
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
