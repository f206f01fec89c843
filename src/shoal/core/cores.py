"""How many cores a process has to itself and the ranks beside it."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of each period, as a container sees it


def usable_cores() -> float:
    """Cores that this process may use: of those it is bound to, what a container's quota leaves (Linux)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return min(bound, int(quota) / int(period))
    except (OSError, ValueError):  # none, or "max"
        return bound
