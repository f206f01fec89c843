"""Launchers of other kinds, under which each task is a world of its own: Shoal reads none of them.

Slurm and MPI start a program several times, and say so in variables of their own. Without
torchrun's variables every one of these tasks would train alone, on all of the data. So one line
tells, unless SHOAL_ALONE=1 says that this is meant.

Only variables count that a launcher sets for the tasks of one start. SLURM_NTASKS, say, is also set
in the script of `sbatch`, which runs once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from shoal.core.numbers import whole

ALONE = "SHOAL_ALONE"
_OURS = ("RANK", "WORLD_SIZE")  # torchrun's, which Shoal reads
_YES = ("1", "true", "yes", "on")
# the variable that has the number of tasks, by launcher
_LAUNCHERS = {
    "SLURM_STEP_NUM_TASKS": "Slurm (srun)",
    "OMPI_COMM_WORLD_SIZE": "Open MPI (mpirun)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH (mpirun)",
    "PMI_SIZE": "MPI (mpiexec)",  # MPICH's Hydra, and Intel's
    "JSM_NAMESPACE_SIZE": "LSF (jsrun)",
    "FLUX_JOB_SIZE": "Flux (flux run)",
}
_told: list[str] = []  # the line, once this process has said it


def warn_if_one_of_many(environment: Mapping[str, str] = os.environ) -> None:
    """Warn once if another launcher has started this process as one of several tasks."""
    line = alone_among(environment)
    if line and not _told:
        _told.append(line)
        logging.getLogger("shoal").warning(line)


def alone_among(environment: Mapping[str, str]) -> str:
    """Return a line about the tasks beside this one, which Shoal knows nothing of; '' for none."""
    if environment.get(ALONE, "").lower() in _YES or any(name in environment for name in _OURS):
        return ""
    for variable, launcher in _LAUNCHERS.items():
        tasks = whole(environment.get(variable, ""))
        if tasks is not None and tasks > 1:
            return (
                f"shoal: {launcher} has started {tasks} tasks ({variable}={tasks}), and Shoal does "
                "not read its variables: each task is alone, and trains a model of its own. To "
                "train one model, start one torchrun on each host, or set RANK, WORLD_SIZE, "
                f"MASTER_ADDR and MASTER_PORT for each task. If they are to be alone: {ALONE}=1"
            )
    return ""
