"""Processor time by quota: processes in a control group have so many cores' worth, and no more.

    1  make       a group with its quota, named like the namespace of its host
    2  entering   a command joins the group, and then becomes the rank's program
    3  remove     once no process is in it

Why here: hosts of a lab share processors. By themselves they take turns, and a waiting host leaves
its time to the others, but real hosts do not. Both kinds of control groups work, version 1 and 2.

Cost: the kernel looks at ticks of some milliseconds, so a process that has used up its time sleeps
for a few of them. A group takes less than a millisecond to make.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shoal.core.errors import LabError

ROOT = Path("/sys/fs/cgroup")
# a group has its part in each period: the shortest that makes sense with ticks of 4 ms
PERIOD_US = 10_000
_LEAST_US = 1000  # least quota of the kernel
LEAST_CORES = _LEAST_US / PERIOD_US
_JOIN = 'echo $$ > "$0" && exec "$@"'
_GIVE_UP_S = 2.0  # seconds for killed processes to leave their group


def make(name: str, cores: float) -> Path:
    """Make a group that may take so many cores' worth of time.

    Raises:
        LabError: this machine has no such groups, or does not let us.
    """
    quota_us = round(cores * PERIOD_US)
    try:
        if _is_second():
            # a group has a quota where the one above it hands them out
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
            settings = {"cpu.max": f"{quota_us} {PERIOD_US}"}
        else:
            settings = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
        group = _folder() / name
        # a group of that name may exist, because its last process ended late
        group.mkdir(exist_ok=True)
        _set(group, settings)
    except OSError as error:
        raise LabError(
            "this machine or container does not let a rank have a quota of processor time",
            where=str(ROOT),
            got=str(error),
            do="leave the number of cores out: ranks then share what there is",
        ) from error
    return group


def _set(group: Path, settings: Mapping[str, str]) -> None:
    """Write a group's settings; a group that does not take them is removed."""
    try:
        for setting, value in settings.items():
            (group / setting).write_text(value)
    except OSError:
        with suppress(OSError):
            group.rmdir()
        raise


def entering(group: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs in the group."""
    return ("sh", "-c", _JOIN, str(group / "cgroup.procs"), *command)


def remove(groups: Iterable[Path]) -> None:
    """Remove groups of processes that are being killed. A missing group is no error.

    Each is tried at least once, however long the others take.
    """
    give_up = time.monotonic() + _GIVE_UP_S
    for group in groups:
        while group.exists():
            with suppress(OSError):
                group.rmdir()
                break
            if time.monotonic() >= give_up:
                break
            time.sleep(0.01)


def sweep() -> None:
    """Remove the groups of labs that have lost their launcher."""
    for group in _folder().glob("shoal-*"):
        owner = re.fullmatch(r"shoal-(\d+)-.*", group.name)
        if owner and not Path("/proc", owner[1]).exists():
            remove([group])


def _is_second() -> bool:
    """Return whether version 2 hands out processor time here."""
    with suppress(OSError):
        return "cpu" in (ROOT / "cgroup.controllers").read_text().split()
    return False


def _folder() -> Path:
    return ROOT if _is_second() else ROOT / "cpu"
