"""Processor time of a rank's communication: its process's, and what the kernel spends besides.

A packet that comes is handled in an interrupt, at the cost of whoever computes just then, or in a
kernel thread: of what a byte takes by gloo over TCP, a quarter is on no process's bill. Of the
machine's interrupts a rank's share is counted, as all its ranks send alike while they measure;
never more than its share of all the time that the machine was busy, since kernels differ in whether
a process is billed for interrupts in its own time.

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
    busy_s: float  # interrupts included

    @classmethod
    def now(cls) -> ProcessorTime:
        """Up to this moment; where the kernel does not tell (no Linux), the process's alone."""
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
        """Seconds since then that one of `sharing` ranks on this machine has cost."""
        process_s = self.process_s - start.process_s
        interrupts_s = (self.interrupts_s - start.interrupts_s) / sharing
        return max(process_s, min(process_s + interrupts_s, (self.busy_s - start.busy_s) / sharing))


def page_faults() -> int:
    """How often the kernel gave this thread new, zeroed memory; 0 without Linux."""
    return (
        resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        if hasattr(resource, "RUSAGE_THREAD")
        else 0
    )
