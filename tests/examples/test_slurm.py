"""The job script of the page about Slurm runs as it stands, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "slurm.md"
NODES = 2
# Starts what it is given once for each node, as srun does, and ends with the first failure.
SRUN = r"""#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in $(seq 0 $((SLURM_NNODES - 1))); do
  SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=$SLURM_NNODES \
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES SLURM_STEP_NODELIST=127.0.0.1 "$@" &
done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""
TRAIN = """
import shoal

world = shoal.init()
with open(f"rank{world.rank}", "w") as file:
    file.write(f"{world.rank} of {world.size}")
"""


def blocks() -> list[str]:
    """The job script, and the commands that do without torchrun."""
    return re.findall(r"(?ms)^```sh\n(.*?)^```$", PAGE.read_text())


def free_job() -> int:
    """A number of a job for which the script takes a port where nobody listens."""
    for number in range(1000):
        with socket.socket() as server:
            try:
                server.bind(("", 29500 + number))
            except OSError:
                continue
            return number
    raise AssertionError("no port is free")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("has_torchrun", [True, False])
def test_the_script_of_the_page_starts_one_rank_a_node(tmp_path: Path, has_torchrun: bool) -> None:
    job, without = blocks()
    head, _, _ = job.partition("srun ")
    programs = tmp_path / "bin"
    programs.mkdir()
    torchrun = f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    stand_ins = {"srun": SRUN, "scontrol": "#!/bin/sh\necho 127.0.0.1\n", "torchrun": torchrun}
    stand_ins["python"] = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.sh").write_text(job if has_torchrun else head + without)
    slurm = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(free_job()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": str(NODES),
        "SLURM_CPUS_PER_TASK": "1",
    }
    ran = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env=os.environ | slurm,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(NODES)]
    assert said == [f"{rank} of {NODES}" for rank in range(NODES)]
