"""The folder of a run in the memory of a host: two generations at most, and its lock.

    /dev/shm/shoal-UID-DIGEST/LOCK    held while the job lives; the kernel frees it
                              RUN     the run's id, and where its checkpoints are
                              0/ 1/   generations of even and of odd number

DIGEST is computed from the run's address and the host's name. The host's first rank locks the
folder, and removes it at an orderly end. The folder of a dead job is removed by the next job that
looks, once its run is gone from the disk or an hour has passed. Guarded by
tests/checkpoint/test_host_memory.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

from shoal.checkpoint.folder import remove, write_text
from shoal.checkpoint.run import RunFolder, id_in
from shoal.core.errors import UsageError
from shoal.core.regular_files import open_regular, read_text

DEAD_S = 3600.0  # seconds after which a dead job's generations are removed
_RUN, _LOCK = "RUN", "LOCK"
# a job that looks for leftovers holds the lock for a moment
_TRIES, _AGAIN_S = 20, 0.1


@final
class HostMemory:
    """A run's folder in the memory of this host.

    Args:
        root: root of the host's memory, for instance /dev/shm.
        address: address of the run's checkpoints.
        host: name of this host.
    """

    def __init__(self, root: Path, address: str, host: str) -> None:
        self._root, self._address = root, address
        digest = hashlib.blake2b(f"{host}\n{address}".encode(), digest_size=6).hexdigest()
        self.folder = root / f"shoal-{os.getuid()}-{digest}"
        self._lock: RunFolder | None = None

    def slot(self, number: int) -> Path:
        """Return the folder of a generation, by its number."""
        return self.folder / str(number % 2)

    def slots(self) -> list[Path]:
        """Return the folders of both generations."""
        return [self.slot(0), self.slot(1)]

    def lock(self) -> None:
        """Make the folder, and keep other jobs from it while this process lives.

        Raises:
            UsageError: another job has it, or this process may not write there.
        """
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._root, f"{type(error).__name__}: {error}") from error
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise _unwritable(self.folder, "something of another user, or no folder")
        lock = RunFolder(self.folder)
        for left in reversed(range(_TRIES)):
            try:
                lock.lock()
                break
            except UsageError as error:
                if not left:
                    raise _held_error(self.folder, error) from error
                time.sleep(_AGAIN_S)
        lock.lock_again()
        self._lock = lock
        for slot in self.slots():
            slot.mkdir(mode=0o700, exist_ok=True)

    def note_run(self, run: str, *, on_disk: bool) -> None:
        """Write down the run of these generations, for jobs that find them later.

        Args:
            run: id of the run.
            on_disk: whether this host sees the id in the folder of checkpoints, too.
        """
        address = self._address if on_disk else ""
        write_text(self.folder / _RUN, f"{run}\n{address}\n")

    def unlock(self, *, ended: bool) -> None:
        """Give the folder back, and remove it if the job has `ended` in order."""
        if self._lock is None:
            return
        if ended:
            remove(self.folder)
        self._lock.unlock()
        self._lock = None

    def remove_leftovers(self) -> list[Path]:
        """Remove and return folders of this user's dead jobs that no run will go on with."""
        gone = []
        for folder in self._others():
            with _hold_lock(folder) as is_free:
                if is_free and _is_left(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    gone.append(folder)
        return gone

    def others(self) -> list[Path]:
        """Return the folders that other runs of this user have here."""
        return [*self._others()]

    def _others(self) -> Iterator[Path]:
        pattern = re.compile(rf"shoal-{os.getuid()}-[0-9a-f]{{12}}")
        for folder in sorted(self._root.glob(f"shoal-{os.getuid()}-*")):
            is_one = pattern.fullmatch(folder.name) and folder != self.folder
            if is_one and folder.is_dir() and not folder.is_symlink():
                yield folder


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, and say whether it was free."""
    try:
        lock = open_regular(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except (OSError, ValueError):
        yield not (folder / _LOCK).exists()
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def _is_left(folder: Path) -> bool:
    """Return whether no run will go on from a folder that no job holds."""
    try:
        times = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.rglob("*"))]
        if time.time() - max(times) > DEAD_S:
            return True
        run, address = read_text(folder / _RUN).splitlines()[:2]
    except (OSError, ValueError):
        return False
    return bool(address) and "://" not in address and id_in(Path(address)) != run


def _unwritable(place: Path, got: str) -> UsageError:
    return UsageError(
        "snapshots cannot be kept in this host's memory",
        where=str(place),
        got=got,
        expected="a folder in memory, such as /dev/shm, in which this user may write",
        do="give SHOAL_HOST_MEMORY another one on every host, or leave out in_memory_every",
    )


def _held_error(folder: Path, error: UsageError) -> UsageError:
    return UsageError(
        "another job keeps its snapshots of this run in the host's memory",
        where=str(folder),
        got=error.got,
        do="end the other job, or give each job a folder of checkpoints of its own",
    )
