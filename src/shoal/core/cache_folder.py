"""Cache folder of the user: figures of earlier starts, in a JSON file for each job.

    $SHOAL_CACHE          this folder; or "off", "0", "no" or "false": then nothing is kept
    $XDG_CACHE_HOME/shoal
    ~/.cache/shoal

A file holds the text of its key next to the value. So a file of another job with the same name is
not taken. Files are replaced as wholes, because two jobs may write at once. An error of reading or
writing costs a line. Guarded by tests/core/test_cache_folder.py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Generic, TypeVar

import msgspec

from shoal.core.regular_files import read_text

T = TypeVar("T")
OFF = ("off", "0", "no", "false")
_FORMAT = 1
_TOLD: set[Path] = set()  # folders that were already reported as not writable


class KeptFile(msgspec.Struct):
    """Fields of a file.

    Args:
        format: version of this form.
        key: all that the value depends on.
        written: date and time, in UTC.
        value: the value itself.
    """

    format: int
    key: str
    written: str
    value: msgspec.Raw


@dataclass(frozen=True)
class KeptValue(Generic[T]):
    """Value that an earlier start has kept.

    Args:
        value: the value itself.
        written: its date and time, in UTC.
    """

    value: T
    written: str


def folder() -> Path | None:
    """Return the cache folder, which may not be there yet; None if the user wants or has none."""
    named = os.environ.get("SHOAL_CACHE", "").strip()
    if named.lower() in OFF:
        return None
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(named).expanduser() if named else Path(caches).expanduser() / "shoal"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def path_of(kind: str, key: str) -> Path | None:
    """Return the file of a key; None if the user wants none."""
    here = folder()
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return None if here is None else here / f"{kind}-{digest}.json"


def entries() -> list[Path]:
    """Return the files that are there, in the order of their names."""
    here = folder()
    return [] if here is None or not here.is_dir() else sorted(here.glob("*-*.json"))


def about(path: Path) -> KeptFile:
    """Read a file without its value's type.

    Raises:
        OSError: this user may not read it.
        ValueError, msgspec.MsgspecError: it is no such file.
    """
    return msgspec.json.decode(read_text(path), type=KeptFile)


def read(kind: str, key: str, of: type[T], say: Callable[[str], None]) -> KeptValue[T] | None:
    """Return the value of a key; None if none was kept, or it cannot be read.

    Args:
        kind: the first part of the file's name.
        key: all that the value depends on.
        of: the value's type.
        say: called with one line, the reason why a file was not taken.
    """
    path = path_of(kind, key)
    if path is None:
        return None
    try:
        file = about(path)
        if file.format != _FORMAT or file.key != key:
            raise ValueError("it is of another job, or of another version of Shoal")
        return KeptValue(msgspec.json.decode(file.value, type=of), file.written)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        say(f"{path} cannot be read ({error}): what it had is measured anew, and the file replaced")
        return None


def write(kind: str, key: str, value: object, say: Callable[[str], None]) -> None:
    """Keep a value for a key.

    Args:
        kind: the first part of the file's name.
        key: all that the value depends on.
        value: numbers, texts, and dataclasses of them.
        say: called with one line, the reason why the value cannot be kept.
    """
    path = path_of(kind, key)
    if path is None:
        return
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        text = msgspec.json.encode(value, enc_hook=dict)
        whole = msgspec.json.encode(KeptFile(_FORMAT, key, now, msgspec.Raw(text)))
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            written = Path(file.name)
            try:
                file.write(whole)
                file.close()
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        if path.parent not in _TOLD:
            _TOLD.add(path.parent)
            say(
                f"what was measured cannot be kept in {path.parent} ({error}): let SHOAL_CACHE "
                "name another folder, or say off"
            )
