"""Files that people name: only regular ones are read, and nothing else makes a reader wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UsageError
from shoal.core.plan import Plan
from shoal.core.regular_files import read_bytes, read_text, require_regular
from shoal.profiling.profile_file import Measured
from shoal_tools.report.run_file import load


def test_a_file_and_a_link_to_it_are_read(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("é")
    link.symlink_to(file)
    for path in (file, link):
        require_regular(path)
        assert read_bytes(path) == "é".encode() and read_text(path) == "é"


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def link_to_fifo(folder: Path) -> Path:
    (folder / "link").symlink_to(fifo(folder))
    return folder / "link"


def of_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    return folder / "socket"


OTHERS: dict[str, Callable[[Path], Path]] = {
    "a FIFO": fifo,
    "a link to a FIFO": link_to_fifo,
    "a socket": of_socket,
    "a folder": lambda folder: folder,
    "a device": lambda folder: Path("/dev/zero"),
    "a NUL": lambda folder: folder / "a\0b",
    "nothing": lambda folder: folder / "none",
}
READERS: tuple[Callable[[Path], Any], ...] = (Plan.load, Measured.load, load)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_refused_at_once(tmp_path: Path, other: str) -> None:
    path = OTHERS[other](tmp_path)
    with pytest.raises((OSError, ValueError)):
        read_bytes(path)
    for reader in READERS:
        with pytest.raises(UsageError, match="cannot be read"):
            reader(path)
