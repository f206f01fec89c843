"""The agents of all hosts, from their start to an end that leaves nothing: the launcher's loop.

    lines of ranks           come with its host's name before it, whole lines
    an agent that fails      the others have a job's grace to end, then are ended
    a host that is lost      the same. Ranks that are left there end by themselves
    Ctrl-C, SIGTERM          go to all agents (host_orders.py)

Cost: the loop sleeps while nothing is printed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shoal.contracts.launcher import Job, Result
from shoal_tools.launch.connection import Connection, wait
from shoal_tools.launch.host_orders import HostOrders, say
from shoal_tools.launch.processes import Interrupts, Lines

_LOST, _ENDED = 137, 143  # exit codes of ranks that were lost, or ended: 128 + signal


@dataclass(frozen=True)
class _Exit:
    """The end of one rank."""

    when_s: float
    attempt: int
    rank: int
    code: int
    blamed: int  # the rank that failed first, as this one has heard


@dataclass
class _HostState:
    """News of one host."""

    label: str
    slots: int
    streams: Mapping[bytes, Lines]
    ended: int | None = None  # the agent's exit code
    is_lost: bool = False
    exits: list[_Exit] = field(default_factory=list)

    @property
    def last(self) -> list[_Exit]:
        """The ranks that have ended in the last attempt, in this order."""
        attempt = max((exit.attempt for exit in self.exits), default=0)
        return [exit for exit in self.exits if exit.attempt == attempt]

    @property
    def failure(self) -> _Exit | None:
        """The first rank that failed in the last attempt."""
        return next((exit for exit in self.last if exit.code), None)

    def codes(self, first: int) -> list[int]:
        """Exit codes of the ranks of this host, which count from `first`."""
        other = _LOST if self.is_lost else _ENDED if self.ended else 0
        last = {exit.rank: exit.code for exit in self.last}
        return [last.get(first + slot, other) for slot in range(self.slots)]


@final
class HostRun:
    """All hosts of one launch."""

    def __init__(
        self,
        connections: Sequence[Connection],
        labels: Mapping[Connection, str],
        job: Job,
        interrupts: Interrupts,
    ) -> None:
        self._job, self._interrupts = job, interrupts
        self._orders = HostOrders(interrupts, job.grace_s)
        self._states = {}
        for connection in connections:
            label = labels[connection]
            own = streams(f"[{label}] " if len(connections) > 1 else "")
            self._states[connection] = _HostState(label, connection.host.slots, own)

    def run(self) -> Result:
        """Be here until every host has ended."""
        while self._alive:
            wait(list(self._alive), 0.1)
            for connection, state in list(self._alive.items()):
                self._take(connection, state)
            if not self._orders.turn(self._names):
                for state in self._alive.values():
                    state.ended = _LOST
        for state in self._states.values():
            for lines in state.streams.values():
                lines.end()
        return self._result()

    @property
    def _alive(self) -> dict[Connection, _HostState]:
        return {c: state for c, state in self._states.items() if state.ended is None}

    @property
    def _names(self) -> dict[Connection, str]:
        return {connection: state.label for connection, state in self._alive.items()}

    def _take(self, connection: Connection, state: _HostState) -> None:
        """Act on the messages of a host."""
        for kind, data in connection.take_lines():
            state.streams[kind].feed(data)
        while connection.messages:
            message = connection.messages.pop(0)
            if "rank" in message:
                self._note_rank_end(state, message)
            elif "ended" in message:
                self._note_host_end(connection, message["ended"], message["lines"])
        if not connection.is_open and state.ended is None:
            said = connection.complaint() or f"exit code {connection.code}"
            say(f"{state.label} is lost: {said}")
            state.is_lost = True
            self._note_host_end(connection, _LOST, "")

    def _note_rank_end(self, state: _HostState, message: Mapping[str, Any]) -> None:
        state.exits.append(_Exit(time.monotonic(), **message))
        rank, code = message["rank"], message["code"]
        if code:
            say(f"rank {rank} on {state.label} has ended with exit code {code}")

    def _note_host_end(self, connection: Connection, code: int, lines: str) -> None:
        state = self._states[connection]
        state.ended = code
        if code == 0:
            return
        if state.failure is None and not self._interrupts.received:
            for line in lines.splitlines():  # the agent's own, as no rank says why
                state.streams[b"e"].feed(line.encode() + b"\n")
        if self._alive and not self._orders.is_ending:
            others = ", ".join(self._names.values())
            say(f"{state.label} has failed; {others}: {self._job.grace_s:g} s to end")
            self._orders.end_after(self._job.grace_s, signal.SIGTERM)

    def _result(self) -> Result:
        """Return each rank's exit code, and the first rank that failed."""
        states = list(self._states.values())
        if all(state.ended == 0 for state in states):
            return Result((0,) * self._job.ranks, None)
        codes: list[int] = []
        for state in states:
            codes += state.codes(len(codes))
        return Result(tuple(codes), min(self._first_failure(), len(codes) - 1))

    def _first_failure(self) -> int:
        """Return the rank that failed first. Ranks elsewhere may have ended sooner."""
        states, starts = list(self._states.values()), [0]
        for state in states:
            starts.append(starts[-1] + state.slots)
        lost = [start for state, start in zip(states, starts, strict=False) if state.is_lost]
        if lost:
            return lost[0]
        exits = [exit for state in states for exit in state.last if exit.code]
        first = min(exits, key=lambda exit: exit.when_s, default=None)
        if first is not None:
            return first.blamed if first.blamed in {exit.rank for exit in exits} else first.rank
        failed = [s for s, state in zip(starts, states, strict=False) if state.ended]
        return failed[0]


def streams(prefix: str) -> dict[bytes, Lines]:
    """Return the output streams of a host, by kind of frame."""
    return {b"o": Lines(prefix, sys.stdout), b"e": Lines(prefix, sys.stderr)}
