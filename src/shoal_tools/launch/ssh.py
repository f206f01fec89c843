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
from typing import Any, ClassVar, final

from shoal.comm.rendezvous import host_name, token_of
from shoal.contracts.launcher import MARK, TOKEN, Job, Launcher, Result
from shoal.core.errors import UsageError
from shoal_tools.launch.agent import HostCount, HostPlace, agent_command
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
        restarts: how often ranks start again after a failure.
        address: of the first host, for the others.
        port: where ranks meet, on the first host; 0 for any, as on this machine alone.
        ssh: the program, with options of its own.
    """

    name: ClassVar[str] = "ssh"

    python: str = ""
    folder: str = ""
    same: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    restarts: int = 0
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
        hosts = self.hosts(job)
        with Interrupts() as interrupts:
            connections = self.connections(hosts)
            try:
                needs = self.needs(job, alone=len(hosts) == 1 and hosts[0].is_here)
                ready = ready_hosts(connections, needs, len(hosts), interrupts)[0]
                if interrupts.received:
                    return Result((1,) * job.ranks, 0)
                labels = labels_of(hosts)
                named = {connection: labels[connection.host] for connection in connections}
                self._start(job, ready, named)
                return HostRun(ready.connections, named, job, interrupts).run()
            finally:
                end(connections, job.grace_s)

    def connections(self, hosts: Sequence[SshHost]) -> list[Connection]:
        """Begin to connect to hosts."""
        return [Connection(host, self.ssh, self.interpreter) for host in hosts]

    @property
    def interpreter(self) -> str:
        """The path of Python on each host."""
        return self.python or sys.executable

    def hosts(self, job: Job) -> tuple[SshHost, ...]:
        """Return the hosts of a job, each with the ranks that it takes.

        Raises:
            UsageError: the job cannot start.
        """
        check(job)
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
                do="install openssh-client" if self.ssh[0] == "ssh" else "check --ssh",
            )
        return filled(hosts, job.ranks)

    def needs(self, job: Job, *, alone: bool) -> HostNeeds:
        """Return the needs of a job on each host; `alone`: it is on this machine only."""
        port = self.port if self.port is not None else 0 if alone else PORT
        path = job.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        return HostNeeds(
            self.interpreter,
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
        return tuple(self.interpreter if word == sys.executable else word for word in command)

    def _start(self, job: Job, ready: ReadyHosts, labels: Mapping[Connection, str]) -> None:
        """Start the agent of each host."""
        job_id, token, hosts = uuid.uuid4().hex, token_of(job), len(ready.connections)
        members, address = HostCount(hosts, hosts, self.restarts), (ready.address, ready.port)
        for number, connection in enumerate(ready.connections):
            host, label = connection.host, labels[connection]
            place = HostPlace(number, host.slots, ready.sources[connection])
            lo = {"GLOO_SOCKET_IFNAME": "lo"} if hosts == 1 and host.is_here else {}
            environment = {
                **lo,
                **environment_of(job, host, label, alone=hosts == 1),
                MARK: job_id,
                TOKEN: token,
            }
            words = self._there(job.command)
            command = agent_command(self.interpreter, members, address, place, words)
            connection.order(start=start_order(job, host, command, environment))


def environment_of(job: Job, host: SshHost, label: str, *, alone: bool) -> dict[str, str]:
    """Return the variables of a job on one host, but for the job's id and token."""
    prefix = "" if alone else f"[{label}] "
    return {
        **shipped_variables(os.environ),
        "COLUMNS": str(shutil.get_terminal_size().columns - len(prefix)),
        "SHOAL_HOST": host_name() if host.is_here else label,
        **job.roles,
        **job.environment,
    }


def start_order(
    job: Job, host: SshHost, command: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the order to start a host's agent."""
    return {
        "command": command,
        "environment": environment,
        "grace_s": job.grace_s,
        "silent_s": SILENT_S,
        "slots": host.slots,
    }


def shipped_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to every host.

    Examples:
        >>> shipped_variables({"NCCL_DEBUG": "INFO", "SHOAL_HOST": "a", "HOME": "/root"})
        {'NCCL_DEBUG': 'INFO'}
    """
    return {
        name: text
        for name, text in environment.items()
        if (name in SHIPPED or name.startswith(SHIPPED_PREFIXES)) and name not in _OF_A_HOST
    }


def labels_of(hosts: Sequence[SshHost]) -> dict[SshHost, str]:
    """Return each host's name, with its user where two have the same name."""
    names = Counter(host.name for host in hosts)
    return {host: host.name if names[host.name] == 1 else host.login for host in hosts}


def end(connections: Sequence[Connection], grace_s: float) -> None:
    """Close all connections, which ends all that is left at their far ends."""
    for connection in connections:
        connection.close_input()
    for connection in connections:
        connection.end(grace_s + 2 * KILL_AFTER_S)
