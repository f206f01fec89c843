"""The folder of a run: its checkpoints by step, the last of which LATEST names, and its lock.

    FOLDER/step-00000120/    a checkpoint
    FOLDER/LATEST            the name of the newest
    FOLDER/LOCK              locked while a job writes there; the kernel frees it, however that ends

Guarded by tests/checkpoint/test_run.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from pathlib import Path
from typing import IO, final

from shoal.checkpoint.folder import LATEST, STATE, remove, write_text
from shoal.core.errors import UsageError

_LOCK = "LOCK"
_NAME = re.compile(r"step-([0-9]{8,18})")


def name_of(step: int) -> str:
    """What the checkpoint behind that many steps is called."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The number of steps, where it is such a name."""
    matched = _NAME.fullmatch(name)
    return int(matched[1]) if matched else None


@final
class RunFolder:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: IO[str] | None = None

    def newest(self) -> str | None:
        """The name of the newest checkpoint that is complete; None where there is none.

        That is what LATEST names, or if that is gone, the one of most steps.
        """
        complete = {path.parent.name for path in self.folder.glob(f"step-*/{STATE}")}
        complete = {name for name in complete if step_of(name) is not None}
        with contextlib.suppress(OSError):
            latest = (self.folder / LATEST).read_text(encoding="utf-8").strip()
            if latest in complete:
                return latest
        return max(complete, key=lambda name: step_of(name) or 0, default=None)

    def put_latest(self, name: str, keep: int) -> None:
        """Let LATEST name a checkpoint, and remove older ones, so that `keep` are left."""
        write_text(self.folder / LATEST, f"{name}\n")
        paths = {path.parent: path.stat().st_mtime for path in self.folder.glob(f"step-*/{STATE}")}
        older = [path for path in paths if step_of(path.name) is not None and path.name != name]
        older.sort(key=paths.__getitem__)
        for path in older[: max(0, len(older) - (keep - 1))]:
            # first a name under which nobody looks, as removing takes a while
            gone = path.with_name(f"{path.name}.tmp-gone")
            with contextlib.suppress(OSError):
                path.rename(gone)
            remove(gone)

    def lock(self) -> None:
        """Keep other jobs from writing here, as long as this process lives.

        Raises:
            UsageError: another job does, or this process may not.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / _LOCK, "a+")  # noqa: SIM115  # open as long as it is held
        except OSError as error:
            raise UsageError(
                "checkpoints cannot be written there",
                where=str(self.folder),
                got=f"{type(error).__name__}: {error}",
                do="give a folder in which this user may write, on rank 0's host",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise UsageError(
                "another job writes its checkpoints there",
                where=str(self.folder),
                got=holder or "a lock of another process",
                do="give this job a folder of its own, or end the other one",
            ) from error
        except OSError:
            pass  # a file system without locks
        self._lock = lock
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        for left in self.folder.glob("*.tmp-*"):  # of jobs that were killed
            remove(left)

    def unlock(self) -> None:
        """Let other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
