"""Jobs that a launcher runs, their results, and the contract of launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from shoal.core.registry import Contract

# environment variable with the job's id. Every process of a job inherits it, even in a session of
# its own
MARK = "SHOAL_JOB"
# secret that ranks and launcher share. It signs the values that they read of one another
TOKEN = "SHOAL_TOKEN"
# number of ranks, the last ones, that own parameters, and that run the end of the model
SERVERS, TAIL = "SHOAL_SERVERS", "SHOAL_TAIL"
# file where this rank writes the number of the rank that failed, once it knows
BLAMED = "SHOAL_BLAMED"
# way from a rank to the agent of its host, if there is one: a socket's number and inode
AGENT = "SHOAL_AGENT"
# exit code of a rank that has written a checkpoint and ends so that other hosts can join
CREW_ENDED = 75
# key in the ranks' store: why the job failed (`what`), and the `rank` that failed or null
VERDICT = "verdict"
# key in the ranks' store: the id of the start for which all ranks have come
GO = "go"


def scope(job: str) -> str:
    """Return the prefix of a job's keys in the ranks' store."""
    return f"shoal/{job}" if job else "shoal"


def roles(servers: int, tail: int) -> dict[str, str]:
    """Return the variables that tell every rank how many of the last ranks do not train."""
    numbers = {SERVERS: servers, TAIL: tail}
    return {name: str(number) for name, number in numbers.items() if number}


@dataclass(frozen=True)
class Meeting:
    """Place where a rank meets the others: the address of their store."""

    rank: int
    size: int  # number of all ranks
    address: str
    port: int


@dataclass(frozen=True)
class Seat:
    """A process's place in its job, as its launcher says."""

    host: str
    servers: int = 0  # number of ranks, the last ones, that own parameters and do not train
    tail: int = 0  # number of ranks, the last ones, that run the end of the model
    holder: int | None = 0  # rank that holds the store; None if the launcher holds it
    restarts: bool = False  # whether the launcher may start ranks again, and keeps the store
    job: str = ""  # the job's id, if the launcher gives one
    token: str = field(default="", repr=False)  # the job's secret; "" if there is none
    interface: str | None = None  # network interface for torch, if the user names one
    meeting: Meeting | None = None  # None if the program has joined the ranks itself


@dataclass(frozen=True)
class Job:
    """Command to run once for each rank, with torchrun's environment variables.

    `grace_s` is the time that other ranks get to save, to report and to end by themselves, after
    the first rank fails or after Ctrl-C.
    """

    command: tuple[str, ...]
    ranks: int  # number of all ranks: workers, and after them servers or tail hosts
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 15.0
    servers: int = 0  # number of servers, the last ranks
    tail: int = 0  # number of tail hosts, the last ranks
    ranks_per_host: int | None = None  # None: the launcher decides
    first_speaks: bool = False  # rank 0 speaks for all ranks, so its lines carry no label
    master: str = ""  # the cluster's address for its scheduler; "": the launcher chooses
    # files named in the command, to send to hosts that do not share the disk
    files: tuple[Path, ...] = ()

    @property
    def hosts(self) -> int | None:
        """Number of hosts that the ranks fill, if it is known how many share one."""
        return None if self.ranks_per_host is None else -(-self.ranks // self.ranks_per_host)

    def label(self, rank: int) -> str:
        """Return the text before each line of a rank.

        Examples:
            >>> Job(("true",), 2, first_speaks=True).label(0), Job(("true",), 2).label(1)
            ('', '[rank 1] ')
        """
        return "" if self.first_speaks and rank == 0 else f"[rank {rank}] "

    @property
    def roles(self) -> dict[str, str]:
        """The variables that tell every rank how many ranks do not train."""
        return roles(self.servers, self.tail)


@dataclass(frozen=True)
class Result:
    """Exit codes of all ranks, `exit_codes[rank]`, and the first rank that failed, or None."""

    exit_codes: tuple[int, ...]
    first_failure: int | None

    @property
    def exit_code(self) -> int:
        """Exit code of the first rank that failed, or 0."""
        return 0 if self.first_failure is None else self.exit_codes[self.first_failure]


class Launcher(Contract, ABC):
    """Way to run one command once for each rank."""

    package: ClassVar[str] = "shoal_tools.launch"
    group: ClassVar[str] = "shoal.launchers"

    @abstractmethod
    def missing(self) -> str | None:
        """Return the software or right that this machine lacks for it, or None."""

    def room(self, master: str) -> int:
        """Return how many ranks it starts if the user names no number.

        Args:
            master: the cluster's address, as in `Job`.
        """
        return 1

    @abstractmethod
    def launch(self, job: Job) -> Result:
        """Run the job to its end. No process of it is left afterwards, whatever happens."""
