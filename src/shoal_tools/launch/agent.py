"""The command of one host's agent: torchrun, which starts the ranks of that host.

    N hosts        the static rendezvous: the first host's agent holds the store, without pickles
    m to N hosts   `c10d`: hosts may leave, and ranks start again without them

Cost: torchrun's start, some seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, whole
from shoal_tools.launch.host_end import RANK_SCRIPT


@dataclass(frozen=True)
class TorchrunMembers:
    """The number of hosts that take part, and how often ranks start again."""

    least: int
    most: int
    restarts: int = 0

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may leave."""
        return self.least < self.most


@dataclass(frozen=True)
class TorchrunPlace:
    """One host's place in its job."""

    number: int  # counted from 0
    slots: int
    source: str  # its address towards the first host


def membership(text: str, hosts: int, restarts: int) -> TorchrunMembers:
    """Read `--nnodes`: N, or MIN:MAX; '' for all hosts.

    Raises:
        UsageError: it is neither, or no number of hosts that there are.
    """
    least, colon, most = text.partition(":")
    numbers = [whole(word) for word in ((least, most) if colon else (least, least))]
    if not text:
        return TorchrunMembers(hosts, hosts, restarts)
    if None in numbers or not 0 < (numbers[0] or 0) <= (numbers[1] or 0) <= MOST_RANKS:
        raise UsageError(
            "--nnodes is a number of hosts, or the least and the most of them",
            got=repr(text),
            expected="N, or MIN:MAX",
            do=f"write --nnodes {hosts}, or --nnodes 1:{hosts}",
        )
    found = TorchrunMembers(numbers[0] or 0, numbers[1] or 0, restarts)
    if hosts < found.least or (not found.is_elastic and hosts != found.most):
        raise UsageError(
            "--nnodes asks for other hosts than are named",
            got=f"--nnodes {text}, and {hosts} hosts",
            do="leave --nnodes out, or name as many hosts",
        )
    return found


def agent_command(
    python: str,
    members: TorchrunMembers,
    meeting: tuple[str, int],
    job: str,
    place: TorchrunPlace,
    command: tuple[str, ...],
) -> tuple[str, ...]:
    """Return the words that start one host's agent.

    Args:
        python: the host's interpreter.
        members: of the job.
        meeting: address and port on the first host.
        job: its id.
        place: the host's.
        command: of each rank.
    """
    address, port = meeting
    ranks = ("--nproc-per-node", str(place.slots), "--max-restarts", str(members.restarts))
    # torchrun takes ${local_rank} and $$ for macros
    rank = ("--no-python", "sh", "-c", RANK_SCRIPT, "sh", *command)
    rank = tuple(word.replace("$", "$$") for word in rank)
    if members.is_elastic:
        shown = f"[{address}]" if ":" in address else address
        is_first = "1" if place.number == 0 else "0"
        meet = (
            *("--nnodes", f"{members.least}:{members.most}", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{shown}:{port}", "--rdzv-id", job),
            *("--rdzv-conf", f"is_host={is_first}", "--local-addr", place.source),
        )
        return (python, "-m", "torch.distributed.run", *meet, *ranks, *rank)
    if members.most == 1:
        return (python, "-m", "shoal_tools.launch.torchrun_here", *ranks, *rank)
    static = (
        "--node-rank",
        str(place.number),
        "--master-addr",
        address,
        "--master-port",
        str(port),
    )
    nodes = ("--nnodes", str(members.most))
    return (python, "-m", "torch.distributed.run", *nodes, *static, *ranks, *rank)
