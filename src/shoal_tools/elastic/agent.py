"""The agent of one host: it starts this host's ranks as the meeting place says, and watches them.

    Train     start ranks of that crew, by a fork of a process that has imported PyTorch
    Commit    ask ranks to write a checkpoint at the end of a step, and end
    Halt      kill them: another host is lost, or its ranks have failed
    JobOver   end

SIGTERM or Ctrl-C: tell the meeting place, and have ranks commit with all the others. Then this host
leaves, and the others go on. Ranks die with their agent, by the kernel.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from shoal.comm.rendezvous import host_name
from shoal.core.interfaces import is_loopback
from shoal_tools.elastic.launcher_line import LauncherLine
from shoal_tools.elastic.messages import (
    Commit,
    CrewEnded,
    CrewTerms,
    FromPlace,
    Halt,
    Hello,
    JobOver,
    Leave,
    Outcome,
    Train,
)
from shoal_tools.elastic.ranks import HostRanks
from shoal_tools.elastic.uplink import Uplink
from shoal_tools.elastic.wire import call

_TURN_S = 0.05


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent.

    Args:
        command: script and arguments of each rank.
        slots: number of ranks on this host.
        terms: of the job, alike on all hosts.
        grace_s: seconds for ranks to commit, after this host was told to leave.
        forks: whether ranks are forked from a process that has imported PyTorch.
        address: by which other hosts reach this one; "" for the one that leads to the meeting
            place.
    """

    command: tuple[str, ...]
    slots: int = 1
    terms: CrewTerms = field(default_factory=CrewTerms)
    grace_s: float = 30.0
    forks: bool = True
    address: str = ""


@final
class Agent:
    """One host's agent.

    Args:
        place: host and port of the meeting place; None for the launcher on standard input.
        token: the job's secret.
        options: options of an agent.
        interrupted: grows with each signal that tells this host to leave.
        say: prints a line.
    """

    def __init__(
        self,
        place: tuple[str, int] | None,
        token: str,
        options: AgentOptions,
        interrupted: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self._id, self._options, self._say = uuid.uuid4().hex[:12], options, say
        self._interrupted = interrupted
        self._ranks = HostRanks(options.command, options.slots, forks=options.forks)
        self._line = _line_to(place, token, self._hello, say)
        self._last: CrewEnded | None = None
        self._free = _FreePort()
        self._kill_s = float("inf")  # when the ranks of a host that leaves are killed
        self._leaves = False

    def run(self) -> int:
        """Serve until the job is over, or this host has left; return the exit code."""
        self._line.open()
        try:
            while (code := self._turn()) is None:
                time.sleep(_TURN_S)
            return code
        finally:
            self._ranks.close()
            self._line.close()
            self._free.close()

    def _turn(self) -> int | None:
        """Act on all news; return the exit code at the end."""
        for message in self._line.heard():
            if isinstance(message, JobOver):
                self._say(f"the job is over: {message.why}")
                return message.code
            self._obey(message)
        self._look(time.monotonic())
        if self._interrupted and not self._leaves:
            self._leave()
        if len(self._interrupted) > 1:
            self._kill_s = 0.0  # a second signal means now
        if self._leaves and self._ranks.crew is None:
            self._say("this host has left")
            return 0
        away_s = self._line.away_s
        wait_s = self._options.terms.wait_s
        if self._ranks.crew is None and away_s and time.monotonic() - away_s > wait_s:
            self._say(f"no meeting place has answered at {self._line.name} for {wait_s:g} s")
            return 1
        return None

    def _obey(self, message: FromPlace) -> None:
        crew = self._ranks.crew
        if isinstance(message, Train):
            self._train(message)
        elif isinstance(message, Commit) and crew is not None and crew.number == message.number:
            self._say(f"commits: {message.why}")
            self._ranks.ask_to_commit()
        elif isinstance(message, Halt) and crew is not None and crew.number == message.number:
            self._say(f"halts: {message.why}")
            self._end_crew("halted")

    def _train(self, message: Train) -> None:
        crew = message.crew
        if self._ranks.crew is not None:  # no order of events leads here
            self._ranks.kill()
        self._free.close()  # rank 0 takes it
        first, last = crew.first_rank(self._id), crew.first_rank(self._id) + self._options.slots - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        self._ranks.start(crew, self._id)
        because = f"; {crew.why}" if crew.why else ""
        self._say(f"crew {crew.number} trains on {crew.names}, this host has {ranks}{because}")

    def _look(self, now_s: float) -> None:
        """Look at this host's ranks."""
        if self._ranks.crew is None:
            return
        ended = self._ranks.ended()
        if ended is not None:
            outcome, said, code = ended
            if said:
                self._say(f"a rank of this host {said}")
            self._end_crew(outcome, said, code)
        elif now_s > self._kill_s:
            self._end_crew("failed", f"did not commit in {self._options.grace_s:g} s, as it leaves")

    def _end_crew(self, outcome: Outcome, said: str = "", code: int = 0) -> None:
        """End all that is left of the crew here, and tell the meeting place."""
        crew = self._ranks.crew
        assert crew is not None
        self._ranks.kill()
        self._last = CrewEnded(crew.number, outcome, self._free.renew(), said, code)
        self._line.send(self._last)

    def _leave(self) -> None:
        self._leaves = True
        self._line.send(Leave())
        if self._ranks.crew is not None:
            grace_s = self._options.grace_s
            self._say(f"this host is told to leave: ranks may commit within {grace_s:g} s")
            self._kill_s = time.monotonic() + grace_s
            self._ranks.ask_to_commit()

    def _hello(self, own: str, other: str) -> Hello:
        last = self._last
        return Hello(
            self._id,
            host_name(),
            self._options.slots,
            self._options.address or ("" if is_loopback(own) else own),
            other,
            self._free.number or self._free.renew(),
            self._options.terms,
            self._ranks.crew,
            last.number if last else 0,
            last.outcome if last else "halted",
            self._leaves,
        )


def _line_to(
    place: tuple[str, int] | None,
    token: str,
    hello: Callable[[str, str], Hello],
    say: Callable[[str], None],
) -> Uplink:
    """Return an agent's line, which is not open yet."""
    if place is None:
        return Uplink("standard input", LauncherLine(os.dup(0)).call, hello, say)
    return Uplink(f"{place[0]}:{place[1]}", partial(call, place, token), hello, say)


@final
class _FreePort:
    """A port that is kept free for rank 0, as long as no ranks run."""

    def __init__(self) -> None:
        self._kept: socket.socket | None = None

    @property
    def number(self) -> int:
        """The port, 0 for none."""
        return int(self._kept.getsockname()[1]) if self._kept is not None else 0

    def renew(self) -> int:
        """Take another one."""
        self.close()
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("", 0))
        return self.number

    def close(self) -> None:
        """Give it free."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None
