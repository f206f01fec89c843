"""The command of one host's agent, which starts the ranks of that host.

    N hosts        torchrun's static rendezvous: the first host's agent holds the store, no pickles
    m to N hosts   `shoal agent`, as hosts may leave and come; the launcher keeps membership

Cost: an agent's start, some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, whole
from shoal_tools.launch.host_end import AGENT_SCRIPT, RANK_SCRIPT

LAUNCHER = "-"  # stands for the launcher, which speaks on standard input


@dataclass(frozen=True)
class HostCount:
    """The number of hosts that take part, and how often ranks start again."""

    least: int
    most: int
    restarts: int = 0

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may leave and come."""
        return self.least < self.most


@dataclass(frozen=True)
class HostPlace:
    """One host's place in its job."""

    number: int  # counted from 0
    slots: int
    address: str  # other hosts reach it there


def membership(text: str, hosts: int, restarts: int) -> HostCount:
    """Read `--nnodes`: N, or MIN:MAX; '' for all hosts.

    Raises:
        UsageError: it is neither, or no number of hosts that there are.
    """
    least, colon, most = text.partition(":")
    numbers = [whole(word) for word in ((least, most) if colon else (least, least))]
    if not text:
        return HostCount(hosts, hosts, restarts)
    if None in numbers or not 0 < (numbers[0] or 0) <= (numbers[1] or 0) <= MOST_RANKS:
        raise UsageError(
            "--nnodes is a number of hosts, or the least and the most of them",
            got=repr(text),
            expected="N, or MIN:MAX",
            do=f"write --nnodes {hosts}, or --nnodes 1:{hosts}",
        )
    found = HostCount(numbers[0] or 0, numbers[1] or 0, restarts)
    if hosts < found.least or (not found.is_elastic and hosts != found.most):
        raise UsageError(
            "--nnodes asks for other hosts than are named",
            got=f"--nnodes {text}, and {hosts} hosts",
            do="leave --nnodes out, or name as many hosts",
        )
    return found


def agent_command(
    python: str,
    members: HostCount,
    meeting: tuple[str, int],
    place: HostPlace,
    command: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the words that start torchrun as one host's agent.

    Args:
        python: the host's interpreter.
        members: of the job.
        meeting: address and port on the first host.
        place: the host's.
        command: of each rank.
    """
    address, port = meeting
    ranks = ("--nproc-per-node", str(place.slots), "--max-restarts", str(members.restarts))
    # torchrun takes ${local_rank} and $$ for macros
    rank = ("--no-python", "sh", "-c", RANK_SCRIPT, "sh", *command)
    rank = tuple(word.replace("$", "$$") for word in rank)
    if members.most == 1:
        return (python, "-m", "shoal_tools.launch.torchrun_here", *ranks, *rank)
    static = ("--node-rank", str(place.number), "--master-addr", address)
    nodes = ("--nnodes", str(members.most), *static, "--master-port", str(port))
    return (python, "-m", "torch.distributed.run", *nodes, *ranks, *rank)


def elastic_agent_command(
    python: str,
    members: HostCount,
    place: HostPlace,
    waits: tuple[float, float],
    command: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the words that start `shoal agent`, which reads the launcher from its input.

    Args:
        python: the host's interpreter.
        members: of the job.
        place: the host's.
        waits: seconds to wait for hosts, and for ranks of a host that leaves.
        command: script and arguments of each rank, or -m and a module.
    """
    wait_s, grace_s = waits
    hosts = ("--min", str(members.least), "--max", str(members.most), "--wait-for", f"{wait_s:g}")
    ranks = ("--nproc-per-node", str(place.slots), "--max-restarts", str(members.restarts))
    own = ("--rendezvous", LAUNCHER, "--address", place.address, "--grace", f"{grace_s:g}")
    agent = (python, "-m", "shoal", "agent", *own, *hosts, *ranks, "--", *command)
    return ("sh", "-c", AGENT_SCRIPT, "sh", *agent)
