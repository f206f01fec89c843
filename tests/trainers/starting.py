"""Start a script of this folder in one process, then on two ranks, and read what they found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def on_ranks(
    script: str,
    *before: str,
    folder: Path,
    sizes: Sequence[int] = (1, 2),
    also: Sequence[str] = (),
    timeout: float = 280,
) -> dict[tuple[int, int], Any]:
    """Return each rank's findings, by the number of ranks and the rank.

    Args:
        script: a file here. It writes `SIZE-RANK.pt` into the folder.
        before: its arguments before the folder.
        folder: an empty folder.
        sizes: numbers of ranks, one start for each.
        also: its arguments behind the folder.
        timeout: seconds for each start.
    """
    for size in sizes:
        start = (*_TORCHRUN, str(size)) if size > 1 else ()
        returncode, said = _ended(
            [sys.executable, *start, HERE / script, *before, folder, *also], timeout
        )
        assert returncode == 0, said
    return {
        (size, rank): torch.load(folder / f"{size}-{rank}.pt", weights_only=False)
        for size in sizes
        for rank in range(size)
    }


def _ended(command: Sequence[Any], timeout: float) -> tuple[int, str]:
    """Run a command, and return its exit code and the end of its output.

    torchrun that is killed leaves its ranks behind, so it is asked to end first.
    """
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except BaseException:
        process.terminate()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()
        raise
    return process.returncode, said[-12000:]
