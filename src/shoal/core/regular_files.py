"""Reads files that people name, but only if the name is that of a regular file.

A FIFO would wait for a writer without end, and /dev/zero never ends. So a file is opened without
waiting, and read only if it is a regular file. Guarded by tests/core/test_regular_files.py.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a file, if it is a regular one.

    Args:
        path: the file.
        flags: flags of `os.open`: `os.O_RDONLY`, or `os.O_RDWR` with others.

    Raises:
        OSError: there is none, this user may not read it, or it is no regular file.
        ValueError: no file can have that name.
    """
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666)
    mode = stat.S_IFMT(os.fstat(number).st_mode)
    if mode != stat.S_IFREG:
        os.close(number)
        code = errno.EISDIR if mode == stat.S_IFDIR else errno.EINVAL
        raise OSError(code, f"{_KINDS.get(mode, 'something')}, and not a file", str(path))
    return os.fdopen(number, "rb" if flags == os.O_RDONLY else "r+b")


def require_regular(path: str | Path) -> None:
    """Raise OSError or ValueError as `open_regular` does, for a library that opens by name."""
    open_regular(path).close()


def read_bytes(path: str | Path) -> bytes:
    """Read all of a file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """Read a file of UTF-8. Raises as `open_regular` does, and ValueError for other bytes."""
    return read_bytes(path).decode("utf-8")
