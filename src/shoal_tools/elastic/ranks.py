"""The ranks of one host: started from spares, asked to commit, killed, and watched.

Each rank has a session of its own, a socket to its agent, and dies with it. What ranks leave
behind, such as workers of a DataLoader, is found by a variable that all of it inherits.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import final

from shoal.comm.rendezvous import agent_variable
from shoal.contracts.launcher import CREW_ENDED, MARK
from shoal_tools.elastic.messages import Crew, Outcome
from shoal_tools.launch.processes import DIE_WITH_PARENT, kill_all, marked

_OWNER = "SHOAL_AGENT_ID"  # a variable of all that a crew's ranks of this host start
_PROGRAM = "shoal_tools.elastic.spare"


@final
class RankProcess:
    """A process that waits to be a rank, or is one.

    Args:
        environment: as long as it waits.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._own, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                (*DIE_WITH_PARENT, sys.executable, "-m", _PROGRAM, str(number)),
                env={**os.environ, **environment, **agent_variable(number)},
                stdin=subprocess.DEVNULL,
                pass_fds=(number,),
                start_new_session=True,
            )

    def become(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run the command as a rank."""
        order = {"command": list(command), "environment": dict(environment)}
        with suppress(OSError):  # it has ended, which whoever watches it sees
            self._own.sendall(json.dumps(order).encode() + b"\n")

    def ask_to_commit(self) -> None:
        """Ask the rank to write a checkpoint with all others, and end."""
        with suppress(OSError):
            self._own.send(b"e")

    def kill(self) -> None:
        """End it now, with its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._own.close()


@final
class HostRanks:
    """All ranks of this host, crew after crew.

    Args:
        command: script and arguments.
        slots: number of ranks.
        spares: whether processes wait ahead of time.
    """

    def __init__(self, command: Sequence[str], slots: int, *, spares: bool) -> None:
        self._command, self._slots, self._keeps = tuple(command), slots, spares
        self._spares: list[RankProcess] = []
        self._ranks: list[RankProcess] = []
        self._mark = {_OWNER: uuid.uuid4().hex}
        self.crew: Crew | None = None

    def prepare(self) -> None:
        """Start a process for each rank that the next crew needs."""
        self._spares = [spare for spare in self._spares if spare.process.poll() is None]
        while self._keeps and len(self._spares) < self._slots:
            self._spares.append(RankProcess({**_polite(self._slots), **self._mark}))

    def start(self, crew: Crew, agent: str) -> None:
        """Start the ranks of a crew."""
        self.crew = crew
        for local in range(self._slots):
            fit = [spare for spare in self._spares if spare.process.poll() is None]
            rank = fit[0] if fit else RankProcess({**_polite(self._slots), **self._mark})
            self._spares = fit[1:]
            self._ranks.append(rank)
            rank.become(self._command, variables(crew, agent, local))

    def ask_to_commit(self) -> None:
        """Ask all of them to write a checkpoint, and end."""
        for rank in self._ranks:
            rank.ask_to_commit()

    def ended(self) -> tuple[Outcome, str, int] | None:
        """Return how they ended, in words too, with an exit code; None while some run well."""
        codes = [rank.process.poll() for rank in self._ranks]
        bad = [c for c in codes if c not in (None, 0, CREW_ENDED)]
        if bad:
            code = int(bad[0] or 0)
            name = signal.Signals(-code).name if code < 0 else ""
            words = f"was killed by {name}" if name else f"ended with exit code {code}"
            return "failed", words, code if code > 0 else 128 - code
        if None in codes:
            return None
        return ("committed" if CREW_ENDED in codes else "done"), "", 0

    def kill(self) -> None:
        """End what is left of the crew; spares go on waiting."""
        for rank in self._ranks:
            rank.kill()
        known = {spare.process.pid for spare in self._spares}
        if self._ranks:
            (owner,) = self._mark.items()
            kill_all(lambda: [pid for pid in marked("=".join(owner)) if pid not in known])
        self._ranks, self.crew = [], None

    def close(self) -> None:
        """End everything."""
        spares, self._spares = self._spares, []
        self._ranks += spares
        self.kill()


def variables(crew: Crew, agent: str, local: int) -> dict[str, str]:
    """Return torchrun's variables for a rank of a crew: rank 0 holds the store."""
    places = [member.agent for member in crew.members]
    slots = crew.members[places.index(agent)].slots
    return {
        "RANK": str(crew.first_rank(agent) + local),
        "WORLD_SIZE": str(crew.ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(slots),
        "GROUP_RANK": str(places.index(agent)),
        "GROUP_WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": crew.address,
        "MASTER_PORT": str(crew.port),
        "TORCHELASTIC_RESTART_COUNT": str(crew.number - 1),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RUN_ID": "",
        MARK: f"{crew.job}-{crew.number}",
    }


def _polite(slots: int) -> dict[str, str]:
    """Return variables by which ranks share cores, where the user has not set them."""
    threads = str(max(1, (len(os.sched_getaffinity(0))) // slots))
    wanted = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
