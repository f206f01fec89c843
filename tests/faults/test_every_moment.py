"""A few of the faults of benchmarks/faults.py, one of each kind: the others end, and name the rank.

Their ranks are forked, so that each costs a second of a processor and not ten. Root only, as they
run in labs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal_tools.launch.lab import Lab

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults.py"
needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)

QUICK = (
    "replicate, 2 ranks, rank 1, group 3, kill",
    "tables, 3 ranks, rank 1, group 4, stop",
    "tails, 3 ranks, rank 0, group 2, interface",
)
LONG = (
    "cuts, 3 ranks, rank 1, in forward 2, exception",  # test_lost_ranks.py has it in the quick set
    "tables, 3 ranks, rank 1, before forward 2, stop",
    "cuts, 2 ranks, rank 0, in backward 2, stop",
    "tails, 3 ranks, rank 2, message 12, link down",
    "replicate, 3 ranks, rank 1, measuring the links, link down",
    "staleness, 3 ranks, rank 2, message 12, stop",
)


def tried(faults: tuple[str, ...]) -> str:
    """What the benchmark says of these faults."""
    command = [sys.executable, str(FAULTS), "--beside", str(len(faults))]
    for fault in faults:
        command += ["--case", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    return done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.lab
@needs_lab
@pytest.mark.parametrize(
    "faults", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_every_other_rank_ends_soon_and_names_the_one_that_was_struck(
    faults: tuple[str, ...],
) -> None:
    said = tried(faults)
    assert f"{len(faults)} of {len(faults)} passed" in said, said
