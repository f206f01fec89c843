"""Ranks on several hosts, started from one place by ssh, with one torchrun agent a host.

    here        a connection a host · the checks · one loop    connection, host_checks, host_run
    each host   the far end, which ends with its connection    host_end
                the agent, torchrun, which starts the ranks    agent

The job's token goes through the connection's input, never in an argument or a variable of ssh.

Cost: one ssh and one sleeping process a host. While ranks train, they send nothing but lines.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from shoal.comm.rendezvous import host_name, token_of
from shoal.contracts.launcher import MARK, TOKEN, Job, Launcher, Result
from shoal.core.errors import UsageError
from shoal_tools.launch.agent import TorchrunMembers, TorchrunPlace, agent_command
from shoal_tools.launch.connection import Connection
from shoal_tools.launch.host_checks import HostNeeds, ReadyHosts, ready_hosts
from shoal_tools.launch.host_end import SILENT_S
from shoal_tools.launch.host_list import SshHost, filled, hosts_in
from shoal_tools.launch.host_run import HostRun
from shoal_tools.launch.processes import KILL_AFTER_S, Interrupts, check, missing_tools

PORT = 29500  # torchrun has the same
# Variables that go to every host: these names, and all that begin so.
SHIPPED = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
SHIPPED_PREFIXES = ("SHOAL_", "TORCH_", "NCCL_", "GLOO_", "MKL_")
_OF_A_HOST = ("SHOAL_HOST", "SHOAL_CORES", MARK, TOKEN)  # these differ from host to host


@dataclass(frozen=True)
@final
class Ssh(Launcher):
    """Runs a job's ranks on hosts that ssh reaches, or on this machine.

    A job's `master` names the hosts, as `a,b:2`. Without one it is this machine.

    Args:
        python: the interpreter on each host; by default the path of this one.
        folder: the working folder there; by default the path of this one.
        same: files that must be there, equal.
        modules: that must be importable there.
        members: how many hosts take part, by default all.
        address: of the first host, for the others.
        port: where ranks meet, on the first host; 0 for any, as on this machine alone.
        ssh: the program, with options of its own.
    """

    name: ClassVar[str] = "ssh"

    python: str = ""
    folder: str = ""
    same: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    members: TorchrunMembers | None = None
    address: str = ""
    port: int | None = None
    ssh: tuple[str, ...] = ("ssh",)

    def missing(self) -> str | None:
        """Name programs that this machine lacks for it, or None."""
        return missing_tools("setpriv", "sh")

    def room(self, master: str) -> int:
        """Count the slots of the hosts."""
        return sum(host.slots for host in hosts_in(master)) if master else 1

    def launch(self, job: Job) -> Result:
        """Run the job to its end.

        Raises:
            UsageError: the job cannot start, before anything does. All hosts that fail a check
                are named.
            KeyboardInterrupt: after Ctrl-C, when nothing is left.
        """
        check(job)
        hosts = self._hosts(job)
        with Interrupts() as interrupts:
            connections = [Connection(host, self.ssh, self._python) for host in hosts]
            try:
                members = self.members or TorchrunMembers(len(hosts), len(hosts))
                needs = self._needs(job, alone=len(hosts) == 1 and hosts[0].is_here)
                ready, said = ready_hosts(connections, needs, members.least, interrupts)
                if said:
                    print(f"shoal: {said}", file=sys.stderr, flush=True)
                if interrupts.received:
                    return Result((1,) * job.ranks, 0)
                labels = _labels(ready.connections)
                self._start(job, members, ready, labels)
                return HostRun(ready.connections, labels, job, members.least, interrupts).run()
            finally:
                _end(connections, job.grace_s)

    @property
    def _python(self) -> str:
        return self.python or sys.executable

    def _hosts(self, job: Job) -> tuple[SshHost, ...]:
        if not job.master:
            return (SshHost("localhost", slots=job.ranks),)
        hosts = hosts_in(job.master)
        if job.ranks_per_host is not None and {host.slots for host in hosts} != {
            job.ranks_per_host
        }:
            raise UsageError(
                "a host's slots are the number of its ranks, and --ranks-per-host is another one",
                got=f"{job.master}, {job.ranks_per_host} ranks a host",
                do="leave --ranks-per-host out",
            )
        if any(not host.is_here for host in hosts) and shutil.which(self.ssh[0]) is None:
            raise UsageError(
                f"there is no program {self.ssh[0]} here, and hosts are reached by it",
                do="install openssh-client",
            )
        return filled(hosts, job.ranks)

    def _needs(self, job: Job, *, alone: bool) -> HostNeeds:
        port = self.port if self.port is not None else 0 if alone else PORT
        path = job.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        return HostNeeds(
            self._python,
            self.folder or str(Path.cwd()),
            self._there(job.command)[0],
            port,
            self.address,
            self.ssh,
            path=tuple(filter(None, path.split(os.pathsep))),
            same=self.same,
            sent=tuple(map(str, job.files)),
            modules=self.modules,
        )

    def _there(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return the command as hosts run it."""
        return tuple(self._python if word == sys.executable else word for word in command)

    def _start(
        self,
        job: Job,
        members: TorchrunMembers,
        ready: ReadyHosts,
        labels: Mapping[Connection, str],
    ) -> None:
        """Start the agent of each host."""
        job_id, token = uuid.uuid4().hex, token_of(job)
        hosts = len(ready.connections)
        members = members if members.is_elastic else TorchrunMembers(hosts, hosts, members.restarts)
        for number, connection in enumerate(ready.connections):
            host, label = connection.host, labels[connection]
            place = TorchrunPlace(number, host.slots, ready.sources[connection])
            prefix = f"[{label}] " if hosts > 1 else ""
            environment = {
                **shipped(os.environ),
                "COLUMNS": str(shutil.get_terminal_size().columns - len(prefix)),
                "SHOAL_HOST": host_name() if host.is_here else label,
                **({"GLOO_SOCKET_IFNAME": "lo"} if hosts == 1 and host.is_here else {}),
                **job.roles,
                **job.environment,
                MARK: job_id,
                TOKEN: token,
            }
            address, words = (ready.address, ready.port), self._there(job.command)
            command = agent_command(self._python, members, address, job_id, place, words)
            connection.order(
                start={
                    "command": command,
                    "environment": environment,
                    "grace_s": job.grace_s,
                    "silent_s": SILENT_S,
                    "slots": host.slots,
                }
            )


def shipped(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to every host.

    Examples:
        >>> shipped({"NCCL_DEBUG": "INFO", "SHOAL_HOST": "a", "HOME": "/root"})
        {'NCCL_DEBUG': 'INFO'}
    """
    return {
        name: text
        for name, text in environment.items()
        if (name in SHIPPED or name.startswith(SHIPPED_PREFIXES)) and name not in _OF_A_HOST
    }


def _labels(connections: Sequence[Connection]) -> dict[Connection, str]:
    """Return each host's name, with its user where two have the same name."""
    names = Counter(connection.host.name for connection in connections)
    return {c: c.host.name if names[c.host.name] == 1 else c.host.login for c in connections}


def _end(connections: Sequence[Connection], grace_s: float) -> None:
    """Close all connections, which ends all that is left at their far ends."""
    for connection in connections:
        connection.close_input()
    for connection in connections:
        connection.end(grace_s + 2 * KILL_AFTER_S)
