"""Slurm's and MPI's variables without torchrun's: each task is alone, and is told so."""

from __future__ import annotations

import logging

import pytest

import shoal
from shoal.comm import other_launchers
from shoal.comm.other_launchers import alone_among
from shoal.front import joining

TOLD = {
    "srun": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "MPICH, Intel MPI": {"PMI_SIZE": "4", "PMI_RANK": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "6"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
}
SILENT = {
    "no launcher": {},
    "the script of sbatch": {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
    "a shell of salloc": {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_STEP_NUM_TASKS": "1"},
    "srun --ntasks 1": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
    "no number": {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": ""},
    "torchrun under srun": {"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"},
    "half of torchrun's": {"OMPI_COMM_WORLD_SIZE": "2", "RANK": "0"},  # an error names the rest
    "meant so": {"SLURM_STEP_NUM_TASKS": "8", "SHOAL_ALONE": "1"},
}


@pytest.mark.parametrize("launcher", TOLD)
def test_one_of_several_tasks_is_told_that_it_is_alone(launcher: str) -> None:
    line = alone_among(TOLD[launcher])
    assert "each task is alone" in line and "SHOAL_ALONE=1" in line and "torchrun" in line


@pytest.mark.parametrize("launcher", SILENT)
def test_nothing_is_said_of(launcher: str) -> None:
    assert alone_among(SILENT[launcher]) == ""
    assert alone_among({**TOLD["srun"], "SHOAL_ALONE": "0"}) != ""


def test_it_is_said_once_as_a_process_joins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "found", lambda: None)
    monkeypatch.setattr(joining, "begin", lambda session: None)
    monkeypatch.setattr(joining, "_drain_at_exit", lambda session: None)
    monkeypatch.setattr(other_launchers, "_told", [])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING, "shoal"):
        assert shoal.init().size == shoal.init().size == 1
    assert [record.message.count("each task is alone") for record in caplog.records] == [1]
