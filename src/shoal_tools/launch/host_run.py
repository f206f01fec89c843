"""The agents of all hosts, from their start to an end that leaves nothing: the launcher's loop.

    lines of ranks           come with its host's name before it, whole lines
    an agent that fails      the others have a job's grace to end, then are ended
    a host that is lost      the same. Ranks that are left there end by themselves
    Ctrl-C, SIGTERM          go to all agents, which pass them on. A second one ends all now

Where hosts may leave (`--nnodes MIN:MAX`), a failure ends the job only once too few are left.

Cost: the loop sleeps while nothing is printed.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shoal.contracts.launcher import Job, Result
from shoal_tools.launch.connection import BEAT_S, Connection, wait
from shoal_tools.launch.processes import KILL_AFTER_S, Interrupts, Lines

_LOST, _ENDED = 137, 143  # exit codes of ranks that were lost, or ended: 128 + signal
_LEAVE_S = 2.0  # time for the far end to say its last, beyond a job's grace


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
        least: int,
        interrupts: Interrupts,
    ) -> None:
        self._job, self._least, self._interrupts = job, least, interrupts
        self._states = {
            connection: _HostState(
                labels[connection], connection.host.slots, _streams(labels[connection], connections)
            )
            for connection in connections
        }
        self._failed: list[Connection] = []  # the first one first
        self._is_ending = False
        self._ending: list[tuple[float, int]] = []  # signals that are due: (when, signal)
        self._obeyed = 0  # how many interrupts have been acted on
        self._beat_s = time.monotonic()
        self._give_up_s = math.inf

    def run(self) -> Result:
        """Be here until every host has ended."""
        while self._alive:
            wait(list(self._alive), 0.1)
            for connection, state in list(self._alive.items()):
                self._take(connection, state)
            self._obey()
            self._send_due()
        for state in self._states.values():
            for lines in state.streams.values():
                lines.end()
        return self._result()

    @property
    def _alive(self) -> dict[Connection, _HostState]:
        return {c: state for c, state in self._states.items() if state.ended is None}

    def _take(self, connection: Connection, state: _HostState) -> None:
        """Act on the messages of a host."""
        for kind, data in connection.take_lines():
            state.streams[kind].feed(data)
        while connection.messages:
            message = connection.messages.pop(0)
            if "rank" in message:
                self._rank_ended(state, message)
            elif "ended" in message:
                self._host_ended(connection, message["ended"], message["lines"])
        if not connection.is_open and state.ended is None:
            said = connection.complaint() or f"exit code {connection.code}"
            _say(f"{state.label} is lost: {said}")
            state.is_lost = True
            self._host_ended(connection, _LOST, "")

    def _rank_ended(self, state: _HostState, message: Mapping[str, Any]) -> None:
        state.exits.append(_Exit(time.monotonic(), **message))
        rank, code = message["rank"], message["code"]
        if code:
            _say(f"rank {rank} on {state.label} has ended with exit code {code}")

    def _host_ended(self, connection: Connection, code: int, lines: str) -> None:
        state = self._states[connection]
        state.ended = code
        if code == 0:
            return
        if state.failure is None and not self._interrupts.received:
            for line in lines.splitlines():  # the agent's own, as no rank says why
                state.streams[b"e"].feed(line.encode() + b"\n")
        self._failed.append(connection)
        left = len(self._states) - len(self._failed)
        if left < self._least and self._alive and not self._is_ending:
            others = ", ".join(state.label for state in self._alive.values())
            _say(f"{state.label} has failed; {others}: {self._job.grace_s:g} s to end")
            self._end_after(self._job.grace_s, signal.SIGTERM)

    def _obey(self) -> None:
        """Pass an interrupt on; a second one ends all now."""
        if len(self._interrupts.received) <= self._obeyed:
            return
        again, number = self._obeyed > 0, self._interrupts.received[-1]
        self._obeyed = len(self._interrupts.received)
        if again:
            self._end_after(0.0, signal.SIGKILL)
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        hosts = ", ".join(state.label for state in self._alive.values())
        _say(
            f"{name}: ranks on {hosts} may save and end within {self._job.grace_s:g} s; "
            f"{name} again ends them now"
        )
        self._send(number)
        self._is_ending = True
        self._ending = [(time.monotonic() + self._job.grace_s, signal.SIGKILL)]

    def _send_due(self) -> None:
        now = time.monotonic()
        if now > self._beat_s:
            self._beat_s = now + BEAT_S
            for connection in self._alive:
                connection.order(beat=1)
        while self._ending and self._ending[0][0] <= now:
            _, number = self._ending.pop(0)
            hosts = ", ".join(state.label for state in self._alive.values())
            if hosts:
                _say(f"sending {signal.Signals(number).name} to {hosts}")
            self._send(number)
            if not self._ending:  # a host that does not obey is left to its own end
                self._give_up_s = now + _LEAVE_S
        if now > self._give_up_s:
            for state in self._alive.values():
                state.ended = _LOST

    def _send(self, number: int) -> None:
        for connection in self._alive:
            connection.order(signal=int(number))

    def _end_after(self, delay_s: float, number: int) -> None:
        at = time.monotonic() + delay_s
        self._is_ending = True
        self._ending = [(at, number), (at + KILL_AFTER_S, signal.SIGKILL)]

    def _result(self) -> Result:
        """Return each rank's exit code, and the first rank that failed."""
        states = list(self._states.values())
        ended_well = sum(state.ended == 0 for state in states)
        if ended_well >= self._least:
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


def _streams(label: str, connections: Sequence[Connection]) -> dict[bytes, Lines]:
    prefix = f"[{label}] " if len(connections) > 1 else ""
    return {b"o": Lines(prefix, sys.stdout), b"e": Lines(prefix, sys.stderr)}


def _say(message: str) -> None:
    print(f"shoal: {message}", file=sys.stderr, flush=True)
