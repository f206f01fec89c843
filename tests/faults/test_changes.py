"""Hosts that come and go, in a lab of four: a run ends as if nothing had happened.

They are runs of benchmarks/changes.py with a list of faults each. Together they have every kind.
Root only, as they run in labs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_tools.launch.lab import Lab

CHANGES = Path(__file__).parents[2] / "benchmarks" / "changes.py"
RUNS = {
    # 4 hosts, 3, 4, 2, 4
    "replicate AdamW": "kill:0 join:0 kill:1,2 join:1,2",
    "sliced SGD": "blink:2 leave:3 stop:0",
    "factor AdamW": "place:0 cut:1 leave:0",
    "head SGD": "stop:2 leave:2 join:2",
    "embedding AdamW": "kill:3 cut:0 join:3",
}
# at `--lost-after 5` a link that is down for 3 s is no loss, and one that is down for 30 s is one
LINKS = ("replicate SGD", "blink:1 blink:0 cut:2")


@pytest.mark.processes
@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}")
@pytest.mark.parametrize(
    ("name", "faults", "lost_after_s"),
    [*((name, faults, "8") for name, faults in RUNS.items()), (*LINKS, "5")],
)
def test_a_run_ends_as_if_no_host_had_come_or_gone(
    name: str, faults: str, lost_after_s: str
) -> None:
    way, optimizer = name.split()
    command = [sys.executable, str(CHANGES), "--way", way, "--optimizer", optimizer]
    done = subprocess.run(
        [*command, "--sequence", *faults.split()],
        env={**os.environ, "CHANGES_LOST_S": lost_after_s},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert f"ok   {way}, {optimizer}, seed 0" in done.stdout, done.stdout + done.stderr
