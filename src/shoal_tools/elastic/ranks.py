"""The ranks of one host: started, asked to commit, killed, and watched.

    forked    by a nursery that has imported PyTorch already
    fresh     by Python, as torchrun does

Each rank has a session of its own, a socket to its agent, and dies with it. Processes that
ranks leave behind are found by a variable that all of it inherits.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from shoal.comm.rendezvous import agent_variable
from shoal.contracts.launcher import CREW_ENDED, MARK
from shoal_tools.elastic.messages import Crew, Outcome
from shoal_tools.elastic.nursery import Nursery
from shoal_tools.launch.host_end import POLITE, marked
from shoal_tools.launch.processes import DIE_WITH_PARENT, kill_all

_OWNER = "SHOAL_AGENT_ID"  # a variable of all that a crew's ranks of this host start
_GONE_S = 5.0  # time for a process to go after it was killed


@final
class RankProcess:
    """One rank: a fork of the nursery, or a fresh process where there is none.

    Args:
        command: script and arguments.
        environment: variables of the rank.
        nursery: forks it.
    """

    def __init__(
        self, command: Sequence[str], environment: dict[str, str], nursery: Nursery | None
    ) -> None:
        self._own, theirs = socket.socketpair()
        self._nursery, self._fresh = nursery, None
        with theirs:
            number = theirs.fileno()
            pid = None if nursery is None else nursery.start(command, environment, number)
            if pid is None:
                self._fresh = subprocess.Popen(
                    (*DIE_WITH_PARENT, sys.executable, *command),
                    env={**os.environ, **environment, **agent_variable(number)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(number,),
                    start_new_session=True,
                )
                pid = self._fresh.pid
        self.pid = pid

    def code(self) -> int | None:
        """Return its exit code, -N for signal N; None while it runs."""
        if self._fresh is not None:
            return self._fresh.poll()
        assert self._nursery is not None
        return self._nursery.code(self.pid)

    def ask_to_commit(self) -> None:
        """Ask the rank to write a checkpoint with all others, and end."""
        with suppress(OSError):
            self._own.send(b"e")

    def kill(self) -> None:
        """End it now, with its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        until_s = time.monotonic() + _GONE_S
        while self.code() is None and time.monotonic() < until_s:
            time.sleep(0.005)
        self._own.close()


@final
class HostRanks:
    """All ranks of this host, crew after crew.

    Args:
        command: script and arguments.
        slots: number of ranks.
        forks: whether ranks are forked by a nursery.
    """

    def __init__(self, command: Sequence[str], slots: int, *, forks: bool) -> None:
        self._command, self._slots = tuple(command), slots
        self._ranks: list[RankProcess] = []
        self._mark = uuid.uuid4().hex
        os.environ.update(_polite(slots))
        self._nursery = Nursery() if forks else None
        self.crew: Crew | None = None

    def start(self, crew: Crew, agent: str) -> None:
        """Start the ranks of a crew."""
        self.crew = crew
        for local in range(self._slots):
            environment = {**variables(crew, agent, local), _OWNER: self._mark}
            self._ranks.append(RankProcess(self._command, environment, self._nursery))

    def ask_to_commit(self) -> None:
        """Ask all of them to write a checkpoint, and end."""
        for rank in self._ranks:
            rank.ask_to_commit()

    def ended(self) -> tuple[Outcome, str, int] | None:
        """Return how they ended, in words too, with an exit code; None while some run well."""
        codes = [rank.code() for rank in self._ranks]
        bad = [code for code in codes if code not in (None, 0, CREW_ENDED)]
        if bad:
            code = int(bad[0] or 0)
            name = signal.Signals(-code).name if code < 0 else ""
            words = f"was killed by {name}" if name else f"ended with exit code {code}"
            return "failed", words, code if code > 0 else 128 - code
        if None in codes:
            return None
        return ("committed" if CREW_ENDED in codes else "done"), "", 0

    def kill(self) -> None:
        """End all that is left of the crew."""
        for rank in self._ranks:
            rank.kill()
        if self._ranks:
            kill_all(lambda: marked(f"{_OWNER}={self._mark}"))
        self._ranks, self.crew = [], None

    def close(self) -> None:
        """End everything."""
        self.kill()
        if self._nursery is not None:
            self._nursery.close()


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
    threads = str(max(1, len(os.sched_getaffinity(0)) // slots))
    wanted = {**POLITE, "OMP_NUM_THREADS": threads}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
