"""Ranks as processes of this machine, with the environment variables that torchrun would set.

Why here beside torchrun: it tells which rank failed first, gives the others time to say why, and
holds the rendezvous store itself, so that the store outlives every rank and a verdict can be read
when rank 0 is the one that died.

Cost: a TCP server in the launcher; no polling.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

from shoal.comm.rendezvous import agreed, new_store, token_of, variables
from shoal.contracts.launcher import TOKEN, Job, Launcher, Result
from shoal_tools.launch.processes import (
    Command,
    Interrupts,
    check_here,
    environment,
    missing_tools,
    run,
)


@final
class Local(Launcher):
    """Runs a job's ranks as processes of this machine.

    Examples:
        >>> Local().launch(Job(("true",), ranks=2)).exit_code
        0
    """

    name: ClassVar[str] = "local"

    def missing(self) -> str | None:
        """Name the tools that this machine lacks for it; None if it has all."""
        return missing_tools("setpriv")

    def launch(self, job: Job) -> Result:
        """Run the job to its end.

        Raises: UsageError for a job that cannot start, before anything does. KeyboardInterrupt
            after Ctrl-C, when
        nothing is left; a SIGTERM ends this process in the same way, after cleaning up.
        """
        check_here(job)
        with Interrupts() as interrupts:
            store, token = new_store("127.0.0.1"), token_of(job)
            commands = []
            for rank in range(job.ranks):
                meeting = variables("127.0.0.1", store.port, rank, job.ranks, rank, job.ranks)
                meeting[TOKEN] = token
                variables_here = environment(job, GLOO_SOCKET_IFNAME="lo", **meeting)
                commands.append(
                    Command(job.command, variables_here, f"rank {rank}", job.label(rank))
                )
            return run(commands, job.grace_s, interrupts, partial(agreed, store, token))
