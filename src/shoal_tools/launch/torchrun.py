"""Hands a job to PyTorch's own launcher, `torch.distributed.run`, on this machine.

Why here: to run under the very thing that users run under. A small shell around each rank writes
its exit code down, because torchrun's own says only that some rank failed.

Cost: torchrun's start, about two seconds; and a job's `grace_s`: torchrun ends the other ranks at
once when one fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar, final

from shoal.comm.rendezvous import token_of
from shoal.contracts.launcher import TOKEN, Job, Launcher, Result
from shoal_tools.launch.host_end import job_folder
from shoal_tools.launch.processes import (
    DIE_WITH_PARENT,
    Command,
    Interrupts,
    check_here,
    environment,
    missing_tools,
    run,
)

# Runs a rank and leaves its exit code in the file $SHOAL_EXITS/$RANK. Torchrun's SIGTERM reaches
# the whole group: the shell outlives it (trap) to write the code. Each process dies with its
# parent, so kill -9 on torchrun reaches ranks.
RANK_SCRIPT = f"""
trap : TERM INT
{" ".join(DIE_WITH_PARENT)} "$@"
code=$?
echo $code >"$SHOAL_EXITS/$RANK"
exit $code
"""
PROGRAM = "shoal_tools.launch.torchrun_here"  # another process reads this module
ENDED_BY_TORCHRUN = 143  # a rank without a file: torchrun ended it (128 + SIGTERM)


@final
class Torchrun(Launcher):
    """Runs a job's ranks on this machine under torchrun."""

    name: ClassVar[str] = "torchrun"

    def missing(self) -> str | None:
        """Name the tools that this machine lacks for it; None if it has all."""
        return missing_tools("setpriv", "sh")

    def launch(self, job: Job) -> Result:
        """Run the job to its end.

        Raises: UsageError for a job that cannot start, before anything does. KeyboardInterrupt
            after Ctrl-C, when
        nothing is left; a SIGTERM ends this process in the same way, after cleaning up.
        """
        check_here(job)
        with Interrupts() as interrupts, job_folder() as exits:
            torchrun = (sys.executable, "-m", PROGRAM)
            ranks = ("--nproc-per-node", str(job.ranks), "--no-python")
            rank = (*DIE_WITH_PARENT, "sh", "-c", RANK_SCRIPT, "sh", *job.command)
            # torchrun takes ${local_rank} and $$ for macros
            rank = tuple(word.replace("$", "$$") for word in rank)
            settings = {"SHOAL_EXITS": str(exits), TOKEN: token_of(job)}
            variables = environment(job, GLOO_SOCKET_IFNAME="lo", **settings)
            agent = run(
                [Command((*torchrun, *ranks, *rank), variables, "torchrun")],
                job.grace_s,
                interrupts,
            )
            return _result(job.ranks, agent, exits)


def _result(ranks: int, agent: Result, exits: Path) -> Result:
    if agent.exit_code == 0:
        return Result((0,) * ranks, None)
    codes = [ENDED_BY_TORCHRUN] * ranks
    ended = sorted(exits.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in ended:
        # empty: killed while writing
        codes[int(path.name)] = int(path.read_text() or ENDED_BY_TORCHRUN)
    failures = [int(path.name) for path in ended if codes[int(path.name)]]
    if not failures:  # torchrun itself failed, or was ended, before any rank
        return Result((agent.exit_code,) * ranks, 0)
    return Result(tuple(codes), failures[0])
