"""Memory of the buckets of gradients and parameters: kept, or there only while in use.

    fast   a bucket has its memory from the start
    low    `open` lets it take memory, page by page as it is written, and `close` gives its pages
           back

The tensor and its views stay the same objects. On a CPU under Linux, their memory is a private
mapping, and closing returns its pages to the system (MADV_DONTNEED). A closed bucket then reads as
zeros. Elsewhere, closing resizes the storage to nothing. Then a closed bucket must not be read, and
torch does not check that.

Reference: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB
2023, section 4.3.
"""

from __future__ import annotations

import mmap
import sys
from threading import Lock
from typing import final

import torch
from torch import Tensor

MEMORY = ("fast", "low")
# buckets that backward fills before it waits, if their memory is freed: one under way, one waiting
BUCKETS_A_LANE = 2


@final
class Buckets:
    """Flat tensors of one model's buckets, and their bytes.

    Lanes and backward share this object.
    """

    def __init__(self, memory: str = MEMORY[0]) -> None:
        self.freed = memory == "low"
        self.live = 0  # number of buckets that have memory
        self.live_bytes = self.peak_bytes = 0
        self._mappings: dict[Tensor, mmap.mmap] = {}
        self._open: set[Tensor] = set()
        self._lock = Lock()

    def flat(self, numel: int, like: Tensor) -> Tensor:
        """Make a flat tensor of zeros, open. Make its views, then close it."""
        if self.freed and numel and like.device.type == "cpu" and sys.platform == "linux":
            mapping = mmap.mmap(
                -1, numel * like.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            flat = torch.frombuffer(mapping, dtype=like.dtype, count=numel)
            self._mappings[flat] = mapping
        else:
            flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        self._count(flat, now_open=True)
        return flat

    def open(self, flat: Tensor) -> None:
        """Make a bucket writable. Its values are undefined."""
        if flat in self._open:
            return
        if flat not in self._mappings:
            flat.untyped_storage().resize_(flat.nbytes)
        self._count(flat, now_open=True)

    def close(self, flat: Tensor) -> None:
        """Free a bucket's memory. Neither this rank nor a message under way may be using it."""
        if not self.freed:
            return
        if flat in self._mappings:
            self._mappings[flat].madvise(mmap.MADV_DONTNEED)
        else:
            if flat.is_cuda:
                # another stream, a lane's, may still be using it
                flat.record_stream(torch.cuda.current_stream(flat.device))
            flat.untyped_storage().resize_(0)
        self._count(flat, now_open=False)

    def _count(self, flat: Tensor, now_open: bool) -> None:
        with self._lock:
            (self._open.add if now_open else self._open.discard)(flat)
            self.live = len(self._open)
            self.live_bytes += flat.nbytes if now_open else -flat.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
