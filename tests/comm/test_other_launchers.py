"""Slurm's and MPI's variables: each task is a rank, as under torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.comm import rendezvous
from shoal.comm.other_launchers import adopt, as_torchrun, first_host, tasks_on
from shoal.core.errors import UsageError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_NODELIST": "node[08-10,12]",
    "SLURM_STEP_NODELIST": "node[09-10,12]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1754202113",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "10.0.0.1",
}
READ = {  # rank, size, rank on the host, ranks on the host, address
    "srun": (SLURM, "5 6 1 2 node09"),
    "srun, of the whole job": (
        {name: text for name, text in SLURM.items() if "STEP_N" not in name},
        "5 6 1 2 node08",
    ),
    "Open MPI": (OPEN_MPI, "1 2 1 2 127.0.0.1"),
    "Open MPI inside a job of Slurm": (
        {**SLURM, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_PROCID": "0"},
        "1 2 1 1 node09",
    ),
    "MPICH and Intel": (HYDRA, "3 4 1 2 10.0.0.1"),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "6"}, "5 6 1 2 node09"),
    "MVAPICH": (
        {
            "MV2_COMM_WORLD_RANK": "0",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "0",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        "0 2 0 2 127.0.0.1",
    ),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "6", "MASTER_ADDR": "a"},
        "2 6 - - a",
    ),
    "Flux": (
        {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "MASTER_ADDR": "a"},
        "0 2 - - a",
    ),
}
SILENT = {
    "no launcher": {},
    "the script of sbatch": {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
    "a shell of salloc": {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_STEP_NUM_TASKS": "1"},
    "srun --ntasks 1": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
    "mpirun -n 1 inside a job of Slurm": {**SLURM, "OMPI_COMM_WORLD_SIZE": "1"},
    "no number": {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": ""},
    "torchrun under srun": {**SLURM, "RANK": "0", "WORLD_SIZE": "1"},
    "half of torchrun's": {"OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"},  # an error names the rest
    "meant so": {**SLURM, "SHOAL_ALONE": "1"},
}


@pytest.mark.parametrize("launcher", READ)
def test_a_task_is_a_rank_of(launcher: str) -> None:
    variables, expected = READ[launcher]
    found = as_torchrun(variables)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert " ".join(found.get(name, "-") for name in names) == expected


@pytest.mark.parametrize("launcher", SILENT)
def test_nothing_is_read_of(launcher: str) -> None:
    assert as_torchrun(SILENT[launcher]) == {}
    assert as_torchrun({**SLURM, "SHOAL_ALONE": "0"})


def test_jobs_on_one_host_do_not_meet() -> None:
    ports = [as_torchrun({**SLURM, "SLURM_STEP_ID": str(n)})["MASTER_PORT"] for n in range(5)]
    assert len(set(ports)) == 5 and all(20_000 <= int(port) < 30_000 for port in ports)
    assert as_torchrun({**SLURM, "SLURM_PROCID": "0"})["MASTER_PORT"] == ports[0]
    assert as_torchrun({**SLURM, "MASTER_PORT": "29501"})["MASTER_PORT"] == "29501"
    assert as_torchrun(HYDRA)["MASTER_PORT"] == "29500"


def test_a_host_of_ones_own_goes_before_the_launchers() -> None:
    assert as_torchrun({**SLURM, "MASTER_ADDR": "10.0.0.9"})["MASTER_ADDR"] == "10.0.0.9"


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node5", "node5"),
        ("node[5-7]", "node5"),
        ("node[05,09-12]", "node05"),
        ("a[1-2]b[003-004]c,x", "a1b003c"),
        ("x-1,node[1-2]", "x-1"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_tasks_of_a_node() -> None:
    assert [tasks_on(node, "2(x2),3,1(x2)") for node in range(6)] == [2, 2, 3, 1, 1, None]
    assert tasks_on(0, "two") is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PMI_SIZE": "2"}, "PMI_RANK=None"),
        ({**HYDRA, "PMI_RANK": "4"}, "from 0 to 3"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({**HYDRA, "MASTER_ADDR": ""}, "-genv MASTER_ADDR HOST"),
    ],
)
def test_what_is_missing_is_named(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        as_torchrun(variables)
    assert "SHOAL_ALONE=1" in str(raised.value)


def test_a_process_is_then_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SHOAL_JOB"):
        monkeypatch.delenv(name, raising=False)
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    before = dict(os.environ)
    try:
        adopt()
        seat = rendezvous.seat()
        assert (seat.meeting.rank, seat.meeting.size, seat.meeting.address, seat.job) == (
            *(5, 6, "node09", "4711.0"),
        )
        assert not rendezvous.is_alone() and os.environ["LOCAL_RANK"] == "1"
    finally:
        os.environ.clear()
        os.environ.update(before)


SCRIPT = """
import torch
import shoal
world = shoal.init()
gathered = shoal.gather(torch.tensor([world.rank])).tolist()
print("rank", world.rank, "of", world.size, gathered, flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here: openmpi-bin has it")
def test_mpirun_starts_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SHOAL_JOB", "SHOAL_ALONE")
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    as_root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    done = subprocess.run(
        ("mpirun", "--oversubscribe", "-n", "2", sys.executable, str(script)),
        env={**environment, **as_root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 of 2 [0, 1]", "rank 1 of 2 [0, 1]"]
