"""Network namespaces by name: made, entered by a thread, swept, and taken down with all in them.

Why here: the kernel frees a namespace only when its name, its processes and its sockets are gone,
and a launcher that was killed leaves all three. So a shell watches each launcher (`Guard`). Where
that was killed, too, the next lab takes everything down: a name has the launcher's process number,
`shoal-<pid>-<n>-<host>`.

Cost: a few milliseconds each, most of it starting `ip`.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, final

from shoal.core.errors import LabError
from shoal_tools.launch.processes import kill_all

T = TypeVar("T")

NAMES = Path("/run/netns")  # the folder in which `ip netns` keeps the names
# SETTINGS/name/hosts is /etc/hosts to whatever `ip netns exec name` starts
SETTINGS = Path("/etc/netns")
# CLONE_NEWNS, MS_BIND, MS_REC | MS_PRIVATE
NEW_MOUNTS, BIND, PRIVATE = 0x20000, 0x1000, 0x4000 | 0x40000


def claim(last: str) -> str:
    """Make the namespace `shoal-<pid>-<n>-<last>` with the first free n, for one lab."""
    number = 0
    while complaint := attempt("ip", "netns", "add", f"shoal-{os.getpid()}-{number}-{last}"):
        if not (NAMES / f"shoal-{os.getpid()}-{number}-{last}").exists():
            raise LabError("a network namespace cannot be made", got=complaint)
        number += 1
    return f"shoal-{os.getpid()}-{number}"


def name_hosts(namespace: str, addresses: Mapping[str, str]) -> None:
    """Give host names to addresses inside the namespace, in addition to the machine's own names.

    Each is listed as an IPv4-mapped address too: PyTorch's store looks its peer's name up by that
    one, and where no name server can be reached it prints a warning for each rank.
    """
    lines = [
        f"{address} {name}\n::ffff:{address} {name}-mapped\n" for name, address in addresses.items()
    ]
    (SETTINGS / namespace).mkdir(parents=True, exist_ok=True)
    (SETTINGS / namespace / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(lines))


def inside(namespace: str, work: Callable[[], T]) -> T:
    """Run `work` on a thread in the namespace, with its host names, as `ip netns exec` would.

    Namespaces belong to threads, so nothing changes for the rest of the process. A socket stays in
    the namespace that it was made in, whichever thread serves it later.
    """

    def enter_and_work() -> T:
        enter(namespace)
        return work()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter_and_work).result()


def enter(namespace: str) -> None:
    """Move this thread into the namespace, with its host names."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare come with Python 3.12
    with (NAMES / namespace).open() as name:
        _succeed(libc.setns(name.fileno(), 0))
    _succeed(libc.unshare(NEW_MOUNTS))
    _succeed(libc.mount(None, b"/", None, PRIVATE, None))
    _succeed(libc.mount(bytes(SETTINGS / namespace / "hosts"), b"/etc/hosts", None, BIND, None))


def sweep() -> None:
    """Take down the labs of launchers that were killed before they could do so."""
    names = {path.name for place in (NAMES, SETTINGS) for path in place.glob("shoal-*")}
    owners = {name: re.fullmatch(r"shoal-(\d+)-\d+-\w+", name) for name in sorted(names)}
    take_down([name for name, pid in owners.items() if pid and not Path("/proc", pid[1]).exists()])


def take_down(namespaces: Sequence[str]) -> None:
    """Kill all processes in the namespaces, and remove these. A missing one is no error."""
    present = [name for name in namespaces if (NAMES / name).exists()]
    for name in present:
        kill_all(partial(_processes, name))
    for name in present:
        _run_in_own_session("ip", "netns", "delete", name)
    for name in namespaces:
        shutil.rmtree(SETTINGS / name, ignore_errors=True)


# Waits for a line. At the end of the file without one, the launcher is gone.
_WATCH = """
read -r line && exit
for name in "$@"; do
  kill -KILL $(ip netns pids "$name") 2>/dev/null
  ip netns delete "$name" 2>/dev/null
  rm -rf "$0/$name"
  rmdir /sys/fs/cgroup/"$name".* /sys/fs/cgroup/cpu/"$name".* 2>/dev/null
done
"""


@final
class Guard:
    """A shell that takes namespaces, and quotas of their ranks, down if this process is killed.

    Args:
        namespaces: their names. They may be made later.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        command = ("sh", "-c", _WATCH, str(SETTINGS), *namespaces)
        self._shell = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def release(self) -> None:
        """End the shell, because the namespaces are gone."""
        with suppress(BrokenPipeError):  # somebody has killed the shell
            self._shell.communicate("down\n")


def execute(*command: str) -> None:
    """Run one command that builds the lab. LabError has its complaint if it fails."""
    if complaint := attempt(*command):
        raise LabError("the lab cannot be built", where=" ".join(command), got=complaint)


def attempt(*command: str) -> str:
    """Run a command, and return its complaint if it failed, or ''."""
    done = _run_in_own_session(*command)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _run_in_own_session(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own session: Ctrl-C must not stop a lab half built or half gone."""
    return subprocess.run(
        command, capture_output=True, text=True, start_new_session=True, check=False
    )


def _processes(namespace: str) -> list[int]:
    return [
        int(pid) for pid in _run_in_own_session("ip", "netns", "pids", namespace).stdout.split()
    ]


def _succeed(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
