"""Number of cores that a process may use, alone or with others."""

from __future__ import annotations

import math
import os
from pathlib import Path

from shoal.core.errors import UsageError

CORES = "SHOAL_CORES"  # cores' worth of time that a launcher gives to each rank alone
# microseconds of each period, as a container sees its quota
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CONTAINER = Path("/proc/self/ns/cgroup")


def bound_cores() -> int:
    """Return the number of the machine's cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores() -> float:
    """Return the cores' worth of time that its container may take; infinity without a quota, or
    Linux.
    """
    try:
        quota, period = _QUOTA.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no quota, or "max"
        return math.inf


def given_cores() -> float:
    """Return the cores' worth of time that this process alone has, as its launcher says, or
    infinity.

    Raises:
        UsageError: the variable has no such number.
    """
    text = os.environ.get(CORES, "inf")
    try:
        cores = float(text)
    except ValueError:
        cores = math.nan
    if cores > 0:
        return cores
    raise UsageError(
        f"{CORES} is no number of cores",
        got=repr(text),
        expected="a number above 0, such as 0.5",
        do="leave it unset where nothing bounds a rank by itself",
    )


def container() -> str:
    """Return a name for the container that differs from all others on this machine."""
    try:
        return os.readlink(_CONTAINER)
    except OSError:
        return ""
