"""A launcher of a recipe's own: what to copy for a test of yours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quick_set import __file__ as beside

pytestmark = [pytest.mark.slow, pytest.mark.processes]
TINY = Path(beside).parent / "tiny_recipe.py"
# A rank is behind `nice`, and says its host's name.
LAUNCHER = """
from functools import partial
from shoal.contracts.launcher import TOKEN, Launcher
from shoal_tools.launch.processes import (
    Command, Interrupts, check_here, environment, missing_tools, run,
)
from shoal.comm.rendezvous import agreed, new_store, token_of, variables
import shoal

@shoal.register
class Polite(Launcher):
    name = "polite"

    def missing(self):
        return missing_tools("setpriv", "nice")

    def room(self, master):
        return 2

    def launch(self, job):
        check_here(job)
        with Interrupts() as interrupts:
            store, token = new_store("127.0.0.1"), token_of(job)
            commands = []
            for rank in range(job.ranks):
                meeting = variables("127.0.0.1", store.port, rank, job.ranks, rank, job.ranks)
                meeting |= {TOKEN: token, "SHOAL_HOST": f"polite{rank}"}
                own = environment(job, GLOO_SOCKET_IFNAME="lo", **meeting)
                commands.append(Command(("nice", "-n", "3", *job.command), own, f"polite{rank}"))
            return run(commands, job.grace_s, interrupts, partial(agreed, store, token))
"""


def test_a_recipe_brings_its_own_launcher(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    told = '\nimport os\nprint("nice", os.nice(0), os.environ.get("SHOAL_HOST"))\n'
    recipe.write_text(TINY.read_text() + LAUNCHER + told)
    settings = {name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        (sys.executable, "-m", "shoal", "train", recipe, "--launcher", "polite", "--epochs", "1"),
        env=settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[polite{rank}] nice 3 polite{rank}" in done.stdout
    assert "[polite0] test accuracy" in done.stdout
