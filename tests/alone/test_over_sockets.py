"""Rank 0 acts alone on real processes, over gloo on 127.0.0.1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.mark.parametrize("way", ["column", "pair", "head", "sliced", "embedding", "pipeline"])
def test_others_wait_in_a_barrier_and_at_their_end(way: str) -> None:
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    job = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *job, str(HERE / "alone_job.py"), way],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 is done", "rank 1 is done"]
    assert done.stderr.count("alone came to") == 1
