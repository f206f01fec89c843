"""Checkpoints in a store that fsspec reaches, as "s3://bucket/run", "hdfs://…" and "memory://…".

    write    into a folder of this host, as any checkpoint             (folder.py)
    put      its files, and state.json last: without this marker it is no checkpoint
    replace  an older one of the same name: its marker goes first, then its files
    get      into a folder of rank 0's host, which sends it to the other ranks

A store has no rename, so a checkpoint of a name is gone while it is replaced. A run's checkpoints
have names of their own. A store is not locked. Guarded by tests/checkpoint/test_store.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, final

from shoal.checkpoint.folder import STATE, as_path, passing, unreadable
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.no_operation import nothing

_READING = "shoal.load: bringing the checkpoint"
_WITH_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az"}  # makedirs would make a misspelt one


@final
class Store:
    """A folder in a store.

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.where("")

    def where(self, name: str) -> str:
        """Return the address of something in it, for messages; '' is the folder itself.

        A user's name and password are left out.
        """
        url = re.sub(r"://[^/]*@", "://…@", self.url)
        return f"{url}/{name}" if name else url

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        with _as_os_errors():
            system, root = import_module("fsspec.core").url_to_fs(self.url)
        return system, root

    def check(self) -> None:
        """Refuse an address that no file system here knows, or that cannot be reached."""
        self._require_bucket()
        system, root = self._opened
        with _as_os_errors():
            system.makedirs(root, exist_ok=True)

    def _require_bucket(self) -> None:
        """Raise FileNotFoundError if the address is in a bucket that is not there."""
        system, root = self._opened
        named = system.protocol
        if _WITH_BUCKETS.isdisjoint([named] if isinstance(named, str) else named):
            return
        bucket = root.split("/")[0]
        with _as_os_errors():
            try:
                system.info(bucket)
            except PermissionError:  # it may not be listed, but it is there
                return
            except FileNotFoundError as error:
                raise FileNotFoundError(f"there is no bucket {bucket!r}") from error

    def names(self) -> list[str]:
        """Return the names of all that is in it, also of checkpoints that are not complete."""
        system, root = self._opened
        with _as_os_errors():
            system.invalidate_cache()
            found = system.ls(root, detail=False) if system.exists(root) else []
            return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def complete(self) -> list[str]:
        """Return the names of the checkpoints in it."""
        system, root = self._opened
        with _as_os_errors():
            system.invalidate_cache()
            return [str(path).split("/")[-2] for path in system.glob(f"{root}/*/{STATE}")]

    def has(self, name: str) -> bool:
        """Return whether there is a checkpoint of that name."""
        system, _ = self._opened
        with _as_os_errors():
            system.invalidate_cache()
            return bool(system.exists(f"{self._path(name)}/{STATE}"))

    def put(self, folder: Path, name: str) -> None:
        """Write a checkpoint from a folder of this host."""
        self._require_bucket()
        system, _ = self._opened
        target = self._path(name)
        with _as_os_errors():
            is_other = system.exists(target) and system.ls(target, detail=False)
        if is_other and not self.has(name) and not name:
            raise UsageError(
                "there is something else where the checkpoint is to be",
                got=self.where(name),
                expected="a new name, or that of an older checkpoint",
                do="give another path",
            )
        self.remove(name)
        with _as_os_errors():
            system.makedirs(target, exist_ok=True)
            for file in sorted(folder.iterdir(), key=lambda file: (file.name == STATE, file.name)):
                system.put_file(str(file), f"{target}/{file.name}")

    def get(self, name: str, folder: Path) -> None:
        """Read a checkpoint into a folder of this host."""
        system, _ = self._opened
        with _as_os_errors():
            system.invalidate_cache()
            for path in system.ls(self._path(name), detail=False):
                system.get_file(path, str(folder / str(path).rstrip("/").rpartition("/")[2]))

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its marker first."""
        system, target = self._opened[0], self._path(name)
        with _as_os_errors():
            system.invalidate_cache()
            if system.exists(f"{target}/{STATE}"):
                system.rm_file(f"{target}/{STATE}")
            if system.exists(target):
                system.rm(target, recursive=True)

    def read_text(self, name: str) -> str:
        """Return the text in a small file; '' if there is none."""
        system, path = self._opened[0], self._path(name)
        with _as_os_errors():
            return str(system.cat_file(path).decode()) if system.exists(path) else ""

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, and replace an older one."""
        with _as_os_errors():
            self._opened[0].pipe_file(self._path(name), text.encode())

    def _path(self, name: str) -> str:
        root = self._opened[1]
        return f"{root}/{name}" if name else root


def place_of(path: Any, call: str) -> Path | Store:
    """Return the folder that a script gave to `call`: in a store if it has "://"."""
    if not (isinstance(path, str) and "://" in path):
        return as_path(path, call)
    store = Store(path)
    try:
        store._opened  # noqa: B018
    except OSError as error:
        raise UsageError(
            f"{call} cannot reach that store",
            got=f"{path[:80]}: {error}",
            do="install the package of its file system for fsspec on every rank, as s3fs, gcsfs or "
            "adlfs, or give the path of a folder",
        ) from error
    return store


def writable_where(where: str) -> str:
    """Return the remedy if a checkpoint cannot be written at an address or path."""
    if "://" not in where:
        return "make room, or give a folder in which rank 0 may write"
    return "give an address at which rank 0 may write, and rank 0's host the credentials for it"


@contextmanager
def writable(place: Path | Store) -> Iterator[Path]:
    """Yield a folder to write a checkpoint of that place into; put it into its place at the end."""
    if isinstance(place, Path):
        yield place
        return
    with own_folder(passing()) as folder:
        yield folder / "checkpoint"
        place.put(folder / "checkpoint", "")


@contextmanager
def readable(comm: Comm, place: Any) -> Iterator[Any]:
    """Yield the path that a checkpoint has on a rank that sees it (a collective)."""
    store = agreed(comm, lambda: place_of(place, "shoal.load"), _READING)
    if isinstance(store, Path):
        yield store
        return
    folder = passing()

    def bring() -> None:
        try:
            is_there = store.has("")
            if is_there:
                folder.mkdir(mode=0o700)
                store.get("", folder)
        except OSError as error:
            raise unreadable(str(store), error) from error
        if not is_there:
            raise UsageError(
                "there is no such checkpoint",
                got=str(store),
                expected=f"a folder with {STATE} in it",
                do="give the path that shoal.save was given",
            )

    try:
        agreed(comm, bring if comm.rank == 0 else nothing, _READING, UsageError)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Make a folder that this user alone may read, and remove it at the end."""
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise every error of a store as an OSError: each package has its own classes."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
