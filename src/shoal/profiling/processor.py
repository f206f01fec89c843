"""Processor time of a rank's communication: the process's own, and the kernel's besides.

The kernel handles an incoming packet in an interrupt, which takes time from the running process, or
in a kernel thread. So a quarter of a byte's cost by gloo over TCP is on no process's bill. A rank
counts its share of the machine's interrupts, because all ranks send alike while they measure. The
figure never exceeds the rank's share of the machine's busy time, because some kernels bill a
process for interrupts in its own time.

Linux counts by ticks of 10 ms, so it takes some tenths of a second to measure.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class ProcessorTime:
    """Processor seconds up to a moment, of the process and of the machine under it."""

    process_s: float
    interrupts_s: float
    busy_s: float  # seconds with interrupts

    @classmethod
    def now(cls) -> ProcessorTime:
        """Read the seconds so far. Without Linux only the process's own are known."""
        process_s = time.process_time()
        try:
            total = _STAT.read_text().split("\n", 1)[0].split()
        except OSError:
            return cls(process_s, 0.0, 0.0)
        user, nice, system, _, _, hard, soft = (
            int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in total[1:8]
        )
        return cls(process_s, hard + soft, user + nice + system + hard + soft)

    def since(self, start: ProcessorTime, sharing: int) -> float:
        """Return the seconds since `start` that one of `sharing` ranks on this machine has cost."""
        process_s = self.process_s - start.process_s
        interrupts_s = (self.interrupts_s - start.interrupts_s) / sharing
        return max(process_s, min(process_s + interrupts_s, (self.busy_s - start.busy_s) / sharing))


def page_faults() -> int:
    """Count the times that the kernel gave this thread new, zeroed memory; 0 without Linux."""
    return (
        resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        if hasattr(resource, "RUSAGE_THREAD")
        else 0
    )
