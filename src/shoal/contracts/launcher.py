"""What a launcher is asked to run, what came of it, and the contract of launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from shoal.core.registry import Contract

# an environment variable that every process of a job inherits, whatever session it moves to: its id
MARK = "SHOAL_JOB"
# the secret that ranks and launcher have in common, which signs what they read of each other
TOKEN = "SHOAL_TOKEN"
# how many of the ranks, the last ones, own parameters, or run the end of the model
SERVERS, TAIL = "SHOAL_SERVERS", "SHOAL_TAIL"
# a file for the number of the rank that failed, as this rank has heard
BLAMED = "SHOAL_BLAMED"
# how a rank reaches the agent of its host, if there is one: a socket's number and inode
AGENT = "SHOAL_AGENT"
# exit code of a rank that has written a checkpoint and ends so that other hosts can take part
CREW_ENDED = 75
# in the ranks' store, what befell the job: `what`, and the `rank` that failed or null
VERDICT = "verdict"
# and the id of the start whose ranks have all come
GO = "go"


def scope(job: str) -> str:
    """The prefix of a job's keys in the ranks' store."""
    return f"shoal/{job}" if job else "shoal"


def roles(servers: int, tail: int) -> dict[str, str]:
    """The variables that tell every rank how many, of the last ones, do not train."""
    numbers = {SERVERS: servers, TAIL: tail}
    return {name: str(number) for name, number in numbers.items() if number}


@dataclass(frozen=True)
class Meeting:
    """Where a rank meets the others: the address of their store."""

    rank: int
    size: int  # of all ranks
    address: str
    port: int


@dataclass(frozen=True)
class Seat:
    """A process's place in its job, as its launcher says."""

    host: str
    servers: int = 0  # ranks, the last ones, that own parameters and do not train
    tail: int = 0  # ranks, the last ones, that run the end of the model
    holder: int | None = 0  # the rank that holds the store; None where the launcher does
    restarts: bool = False  # whether the launcher may start ranks again, and keep the store
    job: str = ""  # its id, where the launcher gives one
    token: str = field(default="", repr=False)  # the job's secret; "" where there is none
    interface: str | None = None  # by which torch is to reach other ranks, where the user says so
    meeting: Meeting | None = None  # None where the program has joined the ranks itself


@dataclass(frozen=True)
class Job:
    """One command to run once a rank, with torchrun's environment variables set for each.

    `grace_s`: after the first rank fails, or after Ctrl-C, how long the others may take to save,
    to say why, and to end by themselves.
    """

    command: tuple[str, ...]
    ranks: int  # all of them: workers, and behind them servers or tail hosts
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 15.0
    servers: int = 0  # of the ranks, the last ones
    tail: int = 0  # of the ranks, the last ones
    ranks_per_host: int | None = None  # None: as the launcher places them
    first_speaks: bool = False  # rank 0 speaks for all, so that its lines carry no label
    master: str = ""  # the cluster, as its scheduler is called; "" for the launcher's own choice
    files: tuple[Path, ...] = ()  # of the command's words: sent along to hosts with other disks

    @property
    def hosts(self) -> int | None:
        """How many hosts the ranks fill, where it is said how many share one."""
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
        """The variables that tell every rank how many do not train."""
        return roles(self.servers, self.tail)


@dataclass(frozen=True)
class Result:
    """How the ranks ended: `exit_codes[rank]`, and the first rank that failed, or None."""

    exit_codes: tuple[int, ...]
    first_failure: int | None

    @property
    def exit_code(self) -> int:
        """The first failing rank's exit code, or 0."""
        return 0 if self.first_failure is None else self.exit_codes[self.first_failure]


class Launcher(Contract, ABC):
    """Runs one command once a rank."""

    package: ClassVar[str] = "shoal_tools.launch"
    group: ClassVar[str] = "shoal.launchers"

    @abstractmethod
    def missing(self) -> str | None:
        """What this machine lacks for it, or None."""

    def room(self, master: str) -> int:
        """How many ranks it starts where nobody says a number.

        Args:
            master: as a job's.
        """
        return 1

    @abstractmethod
    def launch(self, job: Job) -> Result:
        """Run the job to its end; nothing of it is left running afterwards, whatever happens."""
