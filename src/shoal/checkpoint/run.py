"""The folder of a run: its checkpoints by step, LATEST, which names the last one, and its lock.

    FOLDER/step-00000120/    a checkpoint
    FOLDER/LATEST            the name of the newest
    FOLDER/LOCK              locked while a job writes there; the kernel frees it, however that ends
    FOLDER/RUN               the run's own id, if it has generations in the memory of hosts

Guarded by tests/checkpoint/test_run.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, final

from shoal.checkpoint.folder import (
    LATEST,
    STATE,
    clean_run,
    gone,
    passing,
    remove,
    unreadable,
    write_text,
)
from shoal.checkpoint.store import Store, writable_where
from shoal.comm.rendezvous import crew
from shoal.core.errors import UsageError
from shoal.core.regular_files import open_regular, read_text

MOST_STEPS = 10**18 - 1
_LOCK, _ID = "LOCK", "RUN"
_OWN = b"process "  # how the text in LOCK begins
_NAME = re.compile(r"step-([0-9]{8,18})")
_ID_FORM = re.compile(r"run ([0-9a-f]{32})\n")


def name_of(step: int) -> str:
    """Return the name of a checkpoint after that many steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the number of steps in a checkpoint's name; None if it is no such name."""
    matched = _NAME.fullmatch(name)
    return int(matched[1]) if matched else None


def id_in(folder: Path) -> str:
    """Return the id of the run that is saved in a folder; "" if it has none."""
    try:
        return _id_of(read_text(folder / _ID))
    except (OSError, ValueError):
        return ""


def _id_of(text: str) -> str:
    matched = _ID_FORM.fullmatch(text)
    return matched[1] if matched else ""


class RunFolder:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: BinaryIO | None = None

    def newest(self) -> str | None:
        """Return the name of the newest complete checkpoint; None if there is none.

        LATEST names it. If that file is gone, or not readable, it is the checkpoint of most steps.
        """
        complete, latest = self._complete(), ""
        with contextlib.suppress(OSError, ValueError), open_regular(self.folder / LATEST) as file:
            latest = file.read(64).decode("ascii").strip()
        return newest_of(complete, latest)

    def where(self, name: str) -> str:
        """Return the address of a checkpoint, for messages."""
        return str(self.folder / name)

    def read_id(self) -> str:
        """Return the run's own id; "" if it has none. The id goes with the folder."""
        return id_in(self.folder)

    def write_id(self, run: str) -> None:
        """Give the run an id.

        Raises:
            OSError: this process may not write there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / _ID, f"run {run}\n")

    def has_gone_back(self) -> bool:
        """Return whether a user has made LATEST name an earlier checkpoint than the last."""
        return _is_earlier(self.newest(), self._complete())

    def bring(self) -> None:
        """Bring the newest checkpoint into the folder, if it is elsewhere."""

    def sweep(self) -> None:
        """Remove the checkpoint that `bring` has brought."""

    def _complete(self) -> dict[str, int]:
        """Return the steps of each complete checkpoint, by its name."""
        states = [path for path in self.folder.glob(f"step-*/{STATE}") if path.is_file()]
        steps = {path.parent.name: step_of(path.parent.name) for path in states}
        return {name: step for name, step in steps.items() if step is not None}

    def put_latest(self, name: str, keep: int) -> None:
        """Let LATEST name a checkpoint, and remove others, so that `keep` are left.

        Checkpoints of more steps go first: the run has left them behind, because it went back to an
        earlier one. Then checkpoints of fewest steps go. No clock decides, because clocks may be
        set.
        """
        write_text(self.folder / LATEST, f"{name}\n")
        for other in left_over(self._complete(), name, keep):
            # rename it first, because removing takes a while
            path = self.folder / other
            with contextlib.suppress(OSError):
                path.rename(gone(path))
            remove(gone(path))

    def lock(self) -> None:
        """Keep other jobs from writing here, while this process lives.

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
            holder = self._hold(lock)
            if holder is None:
                lock.close()
                (self.folder / _LOCK).unlink()
                lock = open_regular(self.folder / _LOCK, flags)
                holder = self._hold(lock) or b""
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
        with contextlib.suppress(OSError):  # the disk may be full; the text is for people only
            os.ftruncate(lock.fileno(), 0)
            of_crew = " of job {} crew {}".format(*own) if (own := crew()) else ""
            who = f"{os.getpid()} on {socket.gethostname()}{of_crew}\n"
            holder = _OWN + os.fsencode(who)
            os.pwrite(lock.fileno(), holder, 0)
        clean_run(self.folder, _NAME.pattern)

    def _hold(self, lock: BinaryIO) -> bytes | None:
        """Take the kernel's lock, and return the text of its last holder.

        None means that an earlier crew of this very job has it: its host is stopped, or away. When
        that host goes on, its `lock_again` finds that the lock was removed, and is refused.
        """
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = lock.read(200).decode(errors="replace").strip()
            if _is_of_earlier_crew(text):
                return None
            raise UsageError(
                "another job writes its checkpoints there",
                where=str(self.folder),
                got=text or "a lock of another process",
                do="give this job a folder of its own, or end the other one",
            ) from error
        except OSError:
            pass  # a file system without locks
        return lock.read(200)

    def lock_again(self) -> None:
        """Lock the folder again, if it was removed meanwhile, and its lock with it."""
        if self._lock is not None and not os.fstat(self._lock.fileno()).st_nlink:
            removed = self._lock
            self.lock()
            removed.close()

    def unlock(self) -> None:
        """Let other jobs write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@final
class StoredRun(RunFolder):
    """A run in a store. Its folder on this host holds a checkpoint on its way.

    Args:
        store: the run's folder in the store. It is not locked.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(passing())
        self._store = store

    def where(self, name: str) -> str:
        return self._store.where(name)

    def read_id(self) -> str:
        try:
            return _id_of(self._store.read_text(_ID))
        except OSError as error:
            raise unreadable(str(self._store), error) from error
        except ValueError:
            return ""

    def write_id(self, run: str) -> None:
        self._store.write_text(_ID, f"run {run}\n")

    def has_gone_back(self) -> bool:
        try:
            stored = self._read_stored()
            return _is_earlier(newest_of(stored, self._store.read_text(LATEST).strip()), stored)
        except OSError as error:
            raise unreadable(str(self._store), error) from error

    def bring(self) -> None:
        try:
            name = newest_of(self._read_stored(), self._store.read_text(LATEST).strip())
            if name is not None:
                self._make()
                (self.folder / name).mkdir()
                self._store.get(name, self.folder / name)
        except OSError as error:
            raise unreadable(str(self._store), error) from error

    def sweep(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_stored(self) -> dict[str, int]:
        steps = {name: step_of(name) for name in self._store.complete()}
        return {name: step for name, step in steps.items() if step is not None}

    def put_latest(self, name: str, keep: int) -> None:
        """Put a checkpoint into the store, have LATEST name it, and remove others as a folder.

        A checkpoint that a killed job has written in part goes, too.
        """
        try:
            self._store.put(self.folder / name, name)
        finally:
            self.sweep()
        self._store.write_text(LATEST, f"{name}\n")
        stored = self._read_stored()
        named = (name for name in self._store.names() if step_of(name) is not None)
        torn = [other for other in named if other not in stored]
        for other in [*torn, *left_over(stored, name, keep)]:
            self._store.remove(other)

    def lock(self) -> None:
        try:
            self._store.check()
        except OSError as error:
            raise UsageError(
                "checkpoints cannot be written there",
                where=str(self._store),
                got=str(error),
                do=writable_where(str(self._store)),
            ) from error

    def lock_again(self) -> None:
        self._make()

    def _make(self) -> None:
        """Make the folder on this host, for this user alone."""
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def unlock(self) -> None:
        self.sweep()


def _is_of_earlier_crew(holder: str) -> bool:
    """Return whether an earlier crew of this process's job wrote this text into a lock."""
    found, own = re.search(r" of job (\S+) crew ([0-9]{1,9})$", holder), crew()
    return bool(found and own and found[1] == own[0] and int(found[2]) < own[1])


def run_at(place: Path | Store) -> RunFolder:
    """Return the run that is saved at a place."""
    return StoredRun(place) if isinstance(place, Store) else RunFolder(place)


def newest_of(complete: Mapping[str, int], latest: str) -> str | None:
    """Return the newest of complete checkpoints: the one that LATEST names, or of most steps."""
    if latest in complete:
        return latest
    return max(complete, key=complete.__getitem__, default=None)


def _is_earlier(name: str | None, steps: Mapping[str, int]) -> bool:
    return name is not None and steps[name] < max(steps.values())


def left_over(steps: Mapping[str, int], name: str, keep: int) -> list[str]:
    """Return the checkpoints that go, so that `keep` are left, `name` among them."""
    now, others = steps.get(name, 0), [other for other in steps if other != name]
    others.sort(key=lambda other: (steps[other] <= now, steps[other]))
    return others[: max(0, len(others) - (keep - 1))]
