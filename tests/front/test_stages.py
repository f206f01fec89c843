"""What is said while work goes on reaches stderr by default, a program's own logging where it has
one, and nobody where it is silenced.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = "from shoal.front.stages import Stages; import logging, sys\n"
LINE = "Stages(speaks=True).say('four ranks')\n"


def said(script: str) -> tuple[str, str]:
    """What a script prints, to stdout and stderr: in a process, as pytest sets up logging."""
    done = subprocess.run(
        [sys.executable, "-c", SAYS + script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "heard"),
    [
        (LINE, "shoal: four ranks\n"),
        (
            "logging.basicConfig(format='own %(name)s %(message)s')\n" + LINE,
            "own shoal four ranks\n",
        ),
        ("logging.getLogger('shoal').setLevel(logging.WARNING)\n" + LINE, ""),
        ("logging.disable()\n" + LINE, ""),
        ("sys.stderr = None\n" + LINE, ""),
        ("sys.stderr.close()\n" + LINE, ""),
        (LINE.replace("True", "False"), ""),
    ],
    ids=["plain", "own logging", "silenced", "disabled", "no stderr", "closed", "another rank"],
)
def test_a_line_reaches_who_wants_it(script: str, heard: str) -> None:
    assert said(script) == ("", heard)


def test_a_stage_is_said_with_its_seconds_unless_it_took_none() -> None:
    script = "import time; stages = Stages(speaks=True); stages.done('planning')\n"
    script += "time.sleep(0.2); stages.done('measuring')\n"
    out, err = said(script)
    assert out == ""
    assert err.startswith("shoal: measuring … ") and err.endswith(" s\n")
    assert err.count("\n") == 1
