"""Reading a checkpoint on every rank: from its folder, or else from a rank that sees the folder."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import state
from shoal.checkpoint.folder import STATE, as_path, found, unreadable
from shoal.checkpoint.run import RunFolder, step_of
from shoal.checkpoint.snapshot import SUFFIX, Saved
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.regular_files import read_bytes

_READING = "shoal.load: finding the checkpoint"
_LOOKING = "shoal.Checkpoints: looking for the newest checkpoint"
_SENDING = "shoal.load: sending files"


def newest(comm: Comm, folder: Path) -> tuple[Path, str] | None:
    """Return the newest checkpoint of a run, and words about it (a collective).

    Ranks may see folders of their own. Then the checkpoint of most steps counts, whichever rank
    sees it, because rank 0 may be on another host than at the start before.

    Args:
        comm: the ranks.
        folder: the run's folder, as each rank sees it.
    """
    own = agreed(comm, lambda: _newest_here(folder), _LOOKING)
    names = comm.gather_objects(own, _LOOKING)
    seen = {name: step_of(name) or 0 for name in reversed(names) if name is not None}
    if not seen:
        return None
    name = max(seen, key=seen.__getitem__)
    if names[0] == name:
        return folder / name, str(folder / name)
    first = names[0] or "none"
    return folder / name, f"{folder / name} of rank {names.index(name)}; rank 0 has {first}"


def fetched(comm: Comm, path: Any, keywords: Collection[str]) -> Saved:
    """Return the checkpoint of that name (a collective).

    Args:
        comm: all ranks that load it.
        path: its folder.
        keywords: keywords of the objects to load. Files of other objects are not sent.

    Raises:
        UsageError: no rank sees the checkpoint, or ranks see different ones.
    """
    path, folder, own_text = agreed(comm, lambda: _look_for(path), _READING)
    texts = comm.gather_objects(own_text, _READING)
    seeing = [rank for rank, text in enumerate(texts) if text is not None]
    if not seeing:
        raise UsageError(
            "there is no such checkpoint",
            got=str(path.absolute()),
            expected=f"a folder with {STATE} in it",
            do="give the path that shoal.save was given, on every host where the folder is",
        )
    first = seeing[0]
    for rank in seeing:
        if texts[rank] != texts[first]:
            raise RanksDiffer(
                f"ranks {first} and {rank} see different checkpoints of that name",
                where=str(path.absolute()),
                do="give all hosts one folder, or the newer checkpoint to each",
                rank=rank,
            )
    where = str(folder or f"{path} on rank {first}")
    read = agreed(comm, lambda: state.parsed(texts[first], where), _READING)
    if len(seeing) == comm.size:
        return Saved(folder or path, read)
    others = {keyword + SUFFIX for keyword in read.objects if keyword not in keywords}
    sent = {
        name: _send_file(comm, seeing, folder, name) for name in read.files if name not in others
    }
    return Saved(folder or path, read, sent)


def _newest_here(folder: Path) -> str | None:
    try:
        return RunFolder(folder).newest()
    except OSError as error:
        raise unreadable(folder, error) from error


def _look_for(given: Any) -> tuple[Path, Path | None, bytes | None]:
    """Return the path, the folder that this rank sees there, and its state.json."""
    path = as_path(given, "shoal.load")
    try:
        folder = found(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return path, folder, None if folder is None else _content(folder / STATE)


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _send_file(comm: Comm, seeing: Sequence[int], folder: Path | None, name: str) -> bytes | None:
    """Return a file's bytes, on the ranks that do not see it; None on others."""
    first = seeing[0]
    missing = [rank for rank in range(comm.size) if rank not in seeing]

    def read() -> bytes:
        return _content(folder / name) if folder is not None and comm.rank == first else b""

    own = agreed(comm, read, _SENDING)
    size = comm.numbers([len(own)] * comm.size, _SENDING)[first]
    if comm.rank == first and own:
        content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        comm.finish([comm.send(content, rank) for rank in missing])
    if comm.rank not in missing:
        return None
    content = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        comm.receive(content, first).wait()
    return content.numpy().tobytes()
