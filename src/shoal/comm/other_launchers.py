"""Variables of other launchers, Slurm's and MPI's, put into the words of torchrun's.

srun and mpirun start a program once for each task, and number the tasks in variables of their own.
Shoal reads them, so `srun python script.py` needs no torchrun. Under each of them a task is a rank.

    rank           the launcher's variables. mpirun's go before srun's, because mpirun inside a
                   Slurm job starts its own daemons by srun
    address        MASTER_ADDR if it is set. Otherwise this host if it has all tasks, or the first
                   host of Slurm's list
    port           MASTER_PORT if it is set. Otherwise a number made of the job's id, so that two
                   jobs on a host do not meet

Only variables that a launcher sets for the tasks of one start count. SLURM_NTASKS, for example, is
also set in the script of `sbatch`, which runs once. With SHOAL_ALONE=1 each task trains alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from shoal.contracts.launcher import MARK
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, whole

ALONE = "SHOAL_ALONE"
_OURS = ("RANK", "WORLD_SIZE")  # torchrun's variables, which go before all others
_YES = ("1", "true", "yes", "on")
_USUAL_PORT = "29500"  # torchrun's port
_PORTS = (
    20_000,
    10_000,
)  # the first port and their number: all are below the ports that the system picks
_FIRST_OF_LIST = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # up to a comma outside brackets
_FIRST_OF_RANGE = re.compile(r"\[([^\],-]+)[^\]]*\]")


@dataclass(frozen=True)
class _TaskVariables:
    """Names of one launcher's variables, by meaning; "" if it has none."""

    launcher: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    job: tuple[str, ...] = ()  # variables that make up the job's id


_LAUNCHERS = (
    _TaskVariables(
        "Open MPI (mpirun)",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE",),
    ),
    _TaskVariables(
        "MVAPICH (mpirun)",
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    _TaskVariables(  # MPICH's Hydra, and Intel's; srun --mpi=pmi2 sets the first two
        "MPI (mpiexec)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    _TaskVariables(
        "LSF (jsrun)",
        *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ),
    _TaskVariables(
        "Flux (flux run)",
        *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
        job=("FLUX_JOB_ID",),
    ),
    _TaskVariables(
        "Slurm (srun)",
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def adopt(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables if another launcher has started this process as one of several.

    Raises:
        UsageError: the launcher's variables are incomplete, or do not say where rank 0 is.
    """
    environment.update(as_torchrun(environment))


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables, made from another launcher's; none if there is no other.

    Raises:
        UsageError: the launcher's variables are incomplete, or do not say where rank 0 is.

    Examples:
        >>> tasks = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7",
        ...          "SLURM_STEP_NODELIST": "n[05-06]", "MASTER_PORT": "29500"}
        >>> found = as_torchrun(tasks)
        >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]
        ('3', '4', 'n05')
    """
    if environment.get(ALONE, "").lower() in _YES or any(name in environment for name in _OURS):
        return {}
    for variables in _LAUNCHERS:
        size = whole(environment.get(variables.size, ""))
        if variables.rank == "SLURM_PROCID" and size is None and _is_in_step(environment):
            size = whole(environment.get("SLURM_NTASKS", ""))
        if size is not None:  # the innermost launcher decides, even if it started a single task
            return _as_torchrun(environment, variables, size) if size > 1 else {}
    return {}


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's form.

    Examples:
        >>> first_host("gpu[07-09,12],login1"), first_host("r[1-2]n[01-16]"), first_host("a,b")
        ('gpu07', 'r1n01', 'a')
    """
    found = _FIRST_OF_LIST.match(hosts.strip())
    return _FIRST_OF_RANGE.sub(r"\1", found[0]) if found else ""


def tasks_on(node: int, counts: str) -> int | None:
    """Return the number of tasks on a node from Slurm's list; None if the list does not say.

    Examples:
        >>> tasks_on(0, "4(x2),1"), tasks_on(2, "4(x2),1"), tasks_on(3, "4(x2),1")
        (4, 1, None)
    """
    for word in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if found is None:
            return None
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    return None


def _as_torchrun(
    environment: Mapping[str, str], variables: _TaskVariables, size: int
) -> dict[str, str]:
    rank = whole(environment.get(variables.rank, ""))
    if rank is None or not rank < size <= MOST_RANKS:
        raise UsageError(
            f"{variables.launcher} has started {size} tasks, and does not say which one this is",
            got=f"{variables.rank}={environment.get(variables.rank)!r}, {variables.size}={size}",
            expected=f"{variables.rank} from 0 to {min(size, MOST_RANKS) - 1}",
            do="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each task. If tasks are "
            f"to be alone, set {ALONE}=1",
        )
    found = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    local_rank, local_size = _local(environment, variables, rank)
    if local_rank is not None:
        found["LOCAL_RANK"] = str(local_rank)
    if local_size is not None:
        found["LOCAL_WORLD_SIZE"] = str(local_size)
    found["MASTER_ADDR"] = environment.get("MASTER_ADDR") or _place(
        environment, variables, size, local_size
    )
    job = ".".join(filter(None, (environment.get(name, "") for name in variables.job)))
    start, many = _PORTS
    port = str(start + zlib.crc32(job.encode()) % many) if job else _USUAL_PORT
    found["MASTER_PORT"] = environment.get("MASTER_PORT") or port
    if job and not environment.get(MARK):
        found[MARK] = job
    return found


def _local(
    environment: Mapping[str, str], variables: _TaskVariables, rank: int
) -> tuple[int | None, int | None]:
    """Return the task's number on its host, and the number of tasks there, if the launcher says
    so.
    """
    local_rank = whole(environment.get(variables.local_rank, ""))
    local_size = whole(environment.get(variables.local_size, ""))
    if whole(environment.get("SLURM_PROCID", "")) != rank:
        return local_rank, local_size
    if local_rank is None:
        local_rank = whole(environment.get("SLURM_LOCALID", ""))
    if local_size is None:
        node = whole(environment.get("SLURM_NODEID", ""))
        counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        local_size = tasks_on(node, counts) if node is not None and counts else None
    return local_rank, local_size


def _place(
    environment: Mapping[str, str], variables: _TaskVariables, size: int, local_size: int | None
) -> str:
    """Return the address of rank 0's host."""
    if local_size == size:
        return "127.0.0.1"
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if first := first_host(hosts):
        return first
    raise UsageError(
        f"{variables.launcher} has started {size} tasks on several hosts, and does not say where "
        "rank 0 is",
        got="MASTER_ADDR is not set",
        do="send its host's name or address to all: mpirun -x MASTER_ADDR=HOST (Open MPI), or "
        f"mpiexec -genv MASTER_ADDR HOST. If tasks are to be alone, set {ALONE}=1",
    )


def _is_in_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process, and not sbatch or salloc."""
    return "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment
