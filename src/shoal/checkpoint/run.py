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
from typing import BinaryIO, final

from shoal.checkpoint.folder import LATEST, STATE, clean_run, gone, remove, write_text
from shoal.core.errors import UsageError
from shoal.core.regular_files import open_regular

MOST_STEPS = 10**18 - 1
_LOCK = "LOCK"
_OWN = b"process "  # how the text in LOCK begins
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
        self._lock: BinaryIO | None = None

    def newest(self) -> str | None:
        """The name of the newest checkpoint that is complete; None where there is none.

        LATEST names it. If that is gone, or not readable, it is the one of most steps.
        """
        complete = self._complete()
        with contextlib.suppress(OSError, ValueError), open_regular(self.folder / LATEST) as file:
            latest = file.read(64).decode("ascii").strip()
            if latest in complete:
                return latest
        return max(complete, key=complete.__getitem__, default=None)

    def _complete(self) -> dict[str, int]:
        """Return the steps of each complete checkpoint, by its name."""
        states = [path for path in self.folder.glob(f"step-*/{STATE}") if path.is_file()]
        steps = {path.parent.name: step_of(path.parent.name) for path in states}
        return {name: step for name, step in steps.items() if step is not None}

    def put_latest(self, name: str, keep: int) -> None:
        """Let LATEST name a checkpoint, and remove others, so that `keep` are left.

        Checkpoints of more steps go first: the run has left them, as it went back to an earlier
        one. Then those of fewest steps go. No clock has a say, as it may have been set.
        """
        write_text(self.folder / LATEST, f"{name}\n")
        steps = self._complete()
        now = steps.pop(name, 0)
        others = sorted(steps, key=lambda other: (steps[other] <= now, steps[other]))
        for other in others[: max(0, len(others) - (keep - 1))]:
            # first a name under which nobody looks, as removing takes a while
            path = self.folder / other
            with contextlib.suppress(OSError):
                path.rename(gone(path))
            remove(gone(path))

    def lock(self) -> None:
        """Keep other jobs from writing here, as long as this process lives.

        Raises:
            UsageError: another job does, or this process may not.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = open_regular(self.folder / _LOCK, flags)
        except (OSError, ValueError) as error:
            raise UsageError(
                "checkpoints cannot be written there",
                where=str(self.folder),
                got=f"{type(error).__name__}: {error}",
                do="give a folder in which this user may write, on rank 0's host",
            ) from error
        try:
            holder = self._held(lock)
        except BaseException:
            lock.close()
            raise
        if not holder.startswith(_OWN) and holder:
            lock.close()
            raise UsageError(
                "there is another file where Shoal keeps its lock",
                where=str(self.folder / _LOCK),
                got=repr(holder[:40]),
                do="give this job a folder of its own",
            )
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk; the text is for people only
            os.ftruncate(lock.fileno(), 0)
            holder = b"%s%d on %s\n" % (_OWN, os.getpid(), os.fsencode(socket.gethostname()))
            os.pwrite(lock.fileno(), holder, 0)
        clean_run(self.folder, _NAME.pattern)

    def _held(self, lock: BinaryIO) -> bytes:
        """Take the kernel's lock, and return the text that its last holder wrote."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                "another job writes its checkpoints there",
                where=str(self.folder),
                got=lock.read(200).decode(errors="replace").strip() or "a lock of another process",
                do="give this job a folder of its own, or end the other one",
            ) from error
        except OSError:
            pass  # a file system without locks
        return lock.read(200)

    def lock_again(self) -> None:
        """Lock the folder anew if it was removed meanwhile, and the lock with it."""
        if self._lock is not None and not os.fstat(self._lock.fileno()).st_nlink:
            removed = self._lock
            self.lock()
            removed.close()

    def unlock(self) -> None:
        """Let other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
