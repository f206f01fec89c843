"""A job on hosts that ssh reaches, which shrinks and grows: `shoal run --nnodes MIN:MAX`.

    here        membership, in this process               members.py
                a connection a host, and one loop         launch/connection.py, host_orders.py
    each host   the far end, which passes messages on     launch/host_end.py
                the agent, which starts the ranks         agent.py

Messages of agents come through the connections. So hosts need no way to this machine, and nothing
listens here. A host that is lost is called again now and then, checked as at the start, and taken
in as one that comes. The job ends with this process, as every job that ssh starts.

Cost: one ssh and two sleeping processes a host, and a small message a host twice a second.
Guarded by tests/tools/elastic/test_ssh_crews.py.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from shoal.comm.rendezvous import token_of
from shoal.contracts.launcher import MARK, TOKEN, Job
from shoal.core.errors import UsageError
from shoal.core.interfaces import is_loopback
from shoal_tools.elastic.members import Members
from shoal_tools.elastic.messages import Hello, Train, from_agent, write
from shoal_tools.launch.agent import HostCount, HostPlace, elastic_agent_command
from shoal_tools.launch.connection import Connection, wait
from shoal_tools.launch.host_checks import ReadyHosts, ready_hosts
from shoal_tools.launch.host_list import SshHost
from shoal_tools.launch.host_orders import HostOrders, say
from shoal_tools.launch.host_run import streams
from shoal_tools.launch.processes import KILL_AFTER_S, Interrupts, Lines
from shoal_tools.launch.ssh import Ssh, end, environment_of, labels_of, start_order

AGAIN_S = 15.0  # time from the loss of a host, or a call in vain, to the next call
LEFT_S = 150.0  # the same for a host that was told to leave: a spot machine has two minutes
_ASKED_S = 1.0  # between two requests for a hello
_OVER_S = 10.0  # time for agents to end, once the job is over
_LEFTOVER = "SHOAL_RUN"  # a variable of all that this launch starts on a host


@dataclass(frozen=True)
class SshCrews:
    """Options of such a job.

    Args:
        ssh: reaches hosts.
        members: number of hosts, and of failures of ranks.
        wait_s: seconds to wait for hosts while there are too few.
        lost_after_s: seconds without a sign of life after which a host is lost.
    """

    ssh: Ssh
    members: HostCount
    wait_s: float = 600.0
    lost_after_s: float = 20.0

    def launch(self, job: Job) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            UsageError: too few hosts can start. All that fail a check are named.
            KeyboardInterrupt: after Ctrl-C, when nothing is left.
        """
        hosts = self.ssh.hosts(job)
        with Interrupts() as interrupts:
            connections = self.ssh.connections(hosts)
            try:
                needs = self.ssh.needs(job, alone=True)
                ready, said = ready_hosts(connections, needs, self.members.least, interrupts)
                if said:
                    say(said)
                run = _CrewRun(self, job, hosts, interrupts)
                for connection in connections:
                    run.begin(connection, ready)
                return run.run() if not interrupts.received else 1
            finally:
                end(connections, job.grace_s)


@dataclass
class _CalledHost:
    """One host of the list, reached or not."""

    host: SshHost
    label: str
    streams: Mapping[bytes, Lines]
    connection: Connection | None = None
    agent: str = ""  # id of the agent that runs there
    address: str = ""  # other hosts reach it there; "" until it is known
    again_s: float = math.inf  # time to call it again
    call: _HostCall | None = None
    problem: str = ""  # the last one that was said
    asked_s: float = 0.0  # time at which a hello was asked for


@final
class _HostCall:
    """A call to a host that was lost: its connection, and the checks on a thread."""

    def __init__(self, connection: Connection, check: Callable[[Connection], ReadyHosts]) -> None:
        self.connection, self._check = connection, check
        self.ready: ReadyHosts | None = None
        self.problem = ""
        self._thread = threading.Thread(target=self._work, name="shoal call", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the checks have ended."""
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.ready = self._check(self.connection)
        except UsageError as error:
            self.problem = str(error).partition("nothing was started")[2].strip() or str(error)

    def end(self) -> None:
        """Close the connection, once the thread has ended."""
        self.connection.close_input()
        self._thread.join()
        self.connection.end(0.0)


@final
class _CrewRun:
    """All hosts of one launch, and membership."""

    def __init__(
        self, options: SshCrews, job: Job, hosts: tuple[SshHost, ...], interrupts: Interrupts
    ) -> None:
        self._options, self._job, self._interrupts = options, job, interrupts
        labels = labels_of(hosts)
        self._hosts = [
            _CalledHost(host, labels[host], streams(f"[{labels[host]}] ")) for host in hosts
        ]
        self._id, self._token = uuid.uuid4().hex, token_of(job)
        self._members = Members(options.lost_after_s, say)
        self._orders = HostOrders(interrupts, job.grace_s)
        self._code = 1  # exit code of the last agent that failed
        self._over_s = math.inf

    def begin(self, connection: Connection, ready: ReadyHosts) -> None:
        """Start the agent of a host that is ready; call others again later."""
        called = next(each for each in self._hosts if each.host == connection.host)
        if connection not in ready.sources:
            called.again_s = time.monotonic() + AGAIN_S
            return
        options, job, host = self._options, self._job, called.host
        source = ready.sources[connection]
        # one host alone looks at itself, and may see its loopback
        source = ready.address if is_loopback(source) else source
        called.address = called.address or source
        place = HostPlace(0, host.slots, called.address)
        waits = options.wait_s, job.grace_s
        words = elastic_agent_command(
            options.ssh.interpreter, options.members, place, waits, job.command[1:]
        )
        own = f"{self._id}-{called.label}"
        environment = {
            **environment_of(job, host, called.label, alone=False),
            MARK: self._id,
            TOKEN: self._token,
            _LEFTOVER: own,
        }
        order = start_order(job, host, words, environment)
        connection.order(start={**order, "speaks": True, "replaces": f"{_LEFTOVER}={own}"})
        called.connection, called.agent, called.problem = connection, "", ""

    def run(self) -> int:
        """Be here until the job is over, and every host has ended."""
        try:
            while self._goes_on:
                wait([*self._alive], 0.1)
                for called in self._hosts:
                    self._take(called)
                self._turn(time.monotonic())
                if not self._orders.turn(self._alive):
                    break
            over = self._members.over
            return over.code if over is not None else 0 if self._orders.is_ending else self._code
        finally:
            for called in self._hosts:
                if called.call is not None:
                    called.call.end()
            end([*self._alive], self._job.grace_s)
            for called in self._hosts:
                for lines in called.streams.values():
                    lines.end()

    @property
    def _alive(self) -> dict[Connection, str]:
        return {c.connection: c.label for c in self._hosts if c.connection is not None}

    @property
    def _goes_on(self) -> bool:
        if self._orders.is_ending or self._members.over is not None:
            return bool(self._alive) and time.monotonic() < self._over_s
        waits = any(called.again_s < math.inf or called.call for called in self._hosts)
        return bool(self._alive) or waits

    def _take(self, called: _CalledHost) -> None:
        """Act on the messages of a host."""
        connection = called.connection
        if connection is None:
            return
        for kind, data in connection.take_lines():
            called.streams[kind].feed(data)
        for text in connection.take_messages():
            self._hear(called, connection, text)
        message = connection.taken("ended")
        if message is not None:
            for line in message["lines"].splitlines():
                called.streams[b"e"].feed(line.encode() + b"\n")
            self._note_end(called, connection, message["ended"])
        elif not connection.is_open:
            say(f"{called.label}: {connection.complaint() or 'the connection has ended'}")
            self._note_end(called, connection, None)

    def _hear(self, called: _CalledHost, connection: Connection, text: bytes) -> None:
        now_s, message = time.monotonic(), from_agent(text)
        if isinstance(message, Hello):
            called.agent = message.agent
        elif called.agent not in self._members.agents and self._members.over is None:
            if now_s - called.asked_s > _ASKED_S:  # it was lost, and is there again
                called.asked_s = now_s
                connection.order(tell="")
            return
        self._members.hear(called.agent, message, now_s)

    def _note_end(self, called: _CalledHost, connection: Connection, code: int | None) -> None:
        """Note the end of a host's agent, with its exit code; None where the host is lost."""
        called.connection = None
        connection.close_input()
        connection.end(KILL_AFTER_S)
        if called.agent:
            self._members.broke(called.agent, time.monotonic())
        if code is not None and not called.agent:
            self._code = code or 1  # it cannot start, and would not at another time
            return
        later_s = LEFT_S if code == 0 else AGAIN_S
        called.again_s = time.monotonic() + later_s
        if self._members.over is None and not self._orders.is_ending:
            say(f"{called.label} has ended, and is called again in {later_s:g} s")

    def _turn(self, now_s: float) -> None:
        """Have membership act, and call hosts that are lost."""
        agents = {c.agent: c.connection for c in self._hosts if c.connection is not None}
        for agent, message in self._members.turn(now_s):
            connection = agents.get(agent)
            if connection is not None and not (
                isinstance(message, Train) and self._orders.is_ending
            ):
                connection.order(tell=write(message).decode())
        if self._members.over is not None:
            self._over_s = min(self._over_s, now_s + _OVER_S)
        elif not self._orders.is_ending:
            for called in self._hosts:
                self._call_again(called, now_s)

    def _call_again(self, called: _CalledHost, now_s: float) -> None:
        if called.call is None:
            if now_s > called.again_s:
                called.again_s = math.inf
                connection = self._options.ssh.connections([called.host])[0]
                called.call = _HostCall(connection, self._check)
            return
        if not called.call.is_over:
            return
        call, called.call = called.call, None
        if call.ready is not None:
            say(f"{called.label} is reached again")
            self.begin(call.connection, call.ready)
            return
        called.again_s = now_s + AGAIN_S
        call.end()
        if call.problem != called.problem:
            called.problem = call.problem
            say(f"{called.label} does not start: {call.problem}")

    def _check(self, connection: Connection) -> ReadyHosts:
        needs = self._options.ssh.needs(self._job, alone=True)
        return ready_hosts([connection], needs, 1, self._interrupts)[0]
