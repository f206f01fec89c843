"""Folders that exist whole or not at all, whatever ends the process that writes them.

    1  write     into NAME.tmp-HOST-PROCESS-NUMBER next to it; each file is flushed to the disk
    2  flush     the folder itself
    3  rename    to NAME, in one step of the file system; over an older one, both change places
    4  flush     the parent, so that the name lasts
    5  LATEST    names it, and gets its place in the same way

If the name is a link, all of this happens where the link leads. Guarded by
tests/checkpoint/test_folder.py. benchmarks/checkpoints.py kills jobs while they save.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.core.errors import UsageError

STATE = "state.json"
LATEST = "LATEST"
RESERVED = RANDOM, FEATURES = "random-state", "feature-states"  # files that no object has
_TMP, _OLD = ".tmp-", ".old-"
_MADE = r"\.tmp-(.+-[0-9]+-[0-9a-f]+|gone)"  # a mark as `_new_name` makes it, or a removal
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux


def as_path(path: Any, call: str) -> Path:
    """Return the path of a folder that a script gave to `call`, or refuse it."""
    try:
        text = os.fspath(path)
        is_path = isinstance(text, str) and bool(text) and b"\0" not in os.fsencode(text)
    except (TypeError, UnicodeEncodeError):  # not a path, or not one that this system can name
        is_path = False
    if not is_path:
        raise UsageError(
            f"{call} takes the path of a folder",
            got=repr(path)[:80],
            expected="a text or a pathlib.Path, which is not empty",
            do='give for instance "run"',
        )
    if "://" in text:  # otherwise a folder of that name would be made here
        raise UsageError(
            f"{call} takes the path of a folder on this host",
            got=text[:80],
            do="mount that file system, or bring the files here",
        )
    return Path(text)


def check_names(names: Iterable[str]) -> None:
    """Refuse names of objects that cannot be the name of a file in a checkpoint."""
    for name in names:
        if not is_plain(name) or name in RESERVED:
            raise UsageError(
                "an object cannot be saved under that name, because its file gets it",
                got=repr(name)[:80],
                expected='a name without "/", of printable characters, and none of '
                + ", ".join(RESERVED),
                do="give it another name",
            )


def is_plain(name: str) -> bool:
    """Return whether a file of that name lies in the folder where it is looked for."""
    return bool(name) and name.isprintable() and "/" not in name


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new folder to write into. At the end it gets the name, or a link target's.

    If the block fails, the new folder is removed, and an older folder of that name stays.

    Raises:
        UsageError: a file or folder that is no checkpoint has that name.
        OSError: the file system refuses.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path / STATE).is_file():
        raise UsageError(
            "there is something else where the checkpoint is to be",
            got=str(path),
            expected="a new name, or that of an older checkpoint",
            do="give another path",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path)
    folder = _new_name(path, _TMP)
    folder.mkdir()  # 1  # save 12
    try:
        yield folder
        flush(folder)  # 2
        _rename(folder, path)  # 3  # save 15
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    flush(path.parent)  # 4


def flush(path: Path) -> None:
    """Flush a folder to the disk, with the names in it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_text(path: Path, text: str) -> None:
    """Write a small file, durably, and replace an older one."""
    new = _new_name(path, _TMP)
    try:
        with open(new, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    flush(path.parent)


def _rename(folder: Path, path: Path) -> None:
    if not path.exists():
        folder.rename(path)
        return
    if _changed_places(folder, path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    # Some file systems cannot do it in one step. If the process ends in between, `found` knows the
    # older folder by its name.
    old = _new_name(path, _OLD)
    path.rename(old)
    try:
        folder.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _changed_places(one: Path, other: Path) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return done == 0


def found(path: Path) -> Path | None:
    """Return the checkpoint of that name; None if there is none."""
    path = Path(os.path.realpath(path))
    if (path / STATE).is_file():
        return path
    with contextlib.suppress(OSError):
        older = sorted(_beside(path, _OLD), key=lambda old: old.stat().st_mtime)
        for old in reversed(older):
            if (old / STATE).is_file():
                return old
    return None


def unreadable(path: Path | str, error: OSError) -> UsageError:
    """The error about a file that the file system does not give."""
    right = "this host's user the right to read it"
    if "://" in str(path):
        right = "rank 0's host the credentials for that address"
    return UsageError(
        "the checkpoint cannot be read",
        where=str(path),
        got=f"{type(error).__name__}: {error}",
        do=f"give {right}, or load another checkpoint",
    )


def clean(path: Path) -> None:
    """Remove leftovers at that name, if their process ran on this host and has ended."""
    for left in _beside(path, _TMP):
        host, _, rest = left.name.partition(_TMP)[2].rpartition("-")[0].rpartition("-")
        if host == _host() and rest.isdigit() and not Path(f"/proc/{rest}").exists():
            remove(left)


def passing() -> Path:
    """Return a new name in this host's temporary folder, for a checkpoint on its way elsewhere.

    Leftovers of processes that have ended are removed.
    """
    name = Path(tempfile.gettempdir()) / "shoal-checkpoint"
    clean(name)
    return _new_name(name, _TMP)


def clean_run(folder: Path, name: str) -> None:
    """Remove the work of killed jobs from a run's folder, but nothing that Shoal did not make.

    Args:
        folder: the run's folder, which this process alone writes.
        name: a pattern of the names of its checkpoints.
    """
    made = re.compile(f"({name}|{LATEST}){_MADE}")
    for left in folder.glob(f"*{_TMP}*"):
        if made.fullmatch(left.name):
            remove(left)


def gone(path: Path) -> Path:
    """Return the name that a checkpoint has while it is removed."""
    return path.with_name(f"{path.name}{_TMP}gone")


def _beside(path: Path, mark: str) -> Iterator[Path]:
    """Yield the paths next to this one with its name and then a mark."""
    return path.parent.glob(f"{glob.escape(path.name)}{mark}*")


def remove(path: Path) -> None:
    """Remove a file, a folder or a link, as far as that can be done. No link is followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _new_name(path: Path, mark: str) -> Path:
    """Return a new name next to this one, with its host and process."""
    return path.with_name(f"{path.name}{mark}{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


def _host() -> str:
    return socket.gethostname().replace("/", "-")
