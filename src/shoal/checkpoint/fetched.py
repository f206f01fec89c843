"""Reading a checkpoint on every rank: from where it is seen, and else from a rank that sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from shoal.checkpoint import state
from shoal.checkpoint.folder import STATE, found, unreadable
from shoal.checkpoint.snapshot import SUFFIX, Saved
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError

_READING = "shoal.load: finding the checkpoint"
_SENDING = "shoal.load: sending files"


def fetched(comm: Comm, path: Path, keywords: Collection[str]) -> Saved:
    """The checkpoint of that name (a collective).

    Args:
        comm: all who load it.
        path: its folder.
        keywords: of the objects that are asked for. Files of others are not sent.

    Raises:
        UsageError: no rank sees it, or ranks see different ones.
    """
    folder = found(path)
    own_text = agreed(comm, lambda: None if folder is None else _content(folder / STATE), _READING)
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
    sent = {name: _sent(comm, seeing, folder, name) for name in read.files if name not in others}
    return Saved(folder or path, read, sent)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _sent(comm: Comm, seeing: Sequence[int], folder: Path | None, name: str) -> bytes | None:
    """A file's bytes, on the ranks that do not see it; None on others."""
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
