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
        done = subprocess.run(
            [sys.executable, *start, HERE / script, *before, folder, *also],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return {
        (size, rank): torch.load(folder / f"{size}-{rank}.pt", weights_only=False)
        for size in sizes
        for rank in range(size)
    }
