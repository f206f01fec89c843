"""A process that is stopped for 10 s costs rounds with a quorum one grace time, on real links.

It is a run of benchmarks/quorum.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUORUM = Path(__file__).parents[2] / "benchmarks" / "quorum.py"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_stopped_rank_costs_one_grace_time(tmp_path: Path) -> None:
    out = tmp_path / "quorum.json"
    how = ("--cases", "stop10", "--rules", "quorum", "--rounds", "12", "--out", str(out))
    ran = subprocess.run(
        (sys.executable, QUORUM, *how), capture_output=True, text=True, timeout=380
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = json.loads(out.read_text())["stop10 quorum"]
    slowest = sorted(record["took_s"])
    assert 5.0 <= slowest[-1] < 10.0, "a round took as long as the stop, or no grace time"
    assert slowest[-2] < 5.0, "a second round waited for the stopped rank"
    assert record["steps"][3] < record["steps"][0], "nothing was missed"
