"""Reading a checkpoint on every rank: from where it is seen, and else from a rank that sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.checkpoint import state
from shoal.checkpoint.folder import STATE, found
from shoal.checkpoint.snapshot import Saved
from shoal.comm.agreement import agreed
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError

_READING = "shoal.load: finding the checkpoint"


def fetched(comm: Comm, path: Path) -> Saved:
    """The checkpoint of that name (a collective).

    Args:
        comm: all who load it.
        path: its folder.

    Raises:
        UsageError: no rank sees it, or ranks see different ones.
    """
    folder = found(path)
    text = agreed(comm, lambda: _text(folder), _READING)
    told = comm.gather_objects(text, _READING)
    seeing = [rank for rank, each in enumerate(told) if each is not None]
    if not seeing:
        raise UsageError(
            "there is no such checkpoint",
            got=str(path.absolute()),
            expected=f"a folder with {STATE} in it",
            do="give the path that shoal.save was given, on every host where the folder is",
        )
    first = seeing[0]
    for rank in seeing:
        if told[rank] != told[first]:
            raise RanksDiffer(
                f"ranks {first} and {rank} see different checkpoints of that name",
                where=str(path.absolute()),
                do="give all hosts one folder, or the newer checkpoint to each",
                rank=rank,
            )
    where = str(folder or f"{path} on rank {first}")
    read = agreed(comm, lambda: state.parsed(told[first], where), _READING)
    sent = {
        name: _sent(comm, first, seeing, folder, name)
        for name in (read.files if len(seeing) < comm.size else ())
    }
    return Saved(folder or path, read, sent)


def _text(folder: Path | None) -> bytes | None:
    try:
        return None if folder is None else (folder / STATE).read_bytes()
    except OSError as error:
        raise UsageError(
            "the checkpoint cannot be read",
            where=str(folder),
            got=f"{type(error).__name__}: {error}",
            do="give this host's user the right to read it",
        ) from error


def _sent(
    comm: Comm, first: int, seeing: Sequence[int], folder: Path | None, name: str
) -> bytes | None:
    """A file's bytes, on the ranks that do not see it; None on others."""
    missing = [rank for rank in range(comm.size) if rank not in seeing]
    own = b""
    if comm.rank == first:
        assert folder is not None
        own = (folder / name).read_bytes()
    size = comm.numbers([len(own)] * comm.size, "shoal.load: sending files")[first]
    if comm.rank == first and own:
        content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        comm.finish([comm.send(content, rank) for rank in missing])
    if comm.rank not in missing:
        return None
    content = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        comm.receive(content, first).wait()
    return content.numpy().tobytes()
