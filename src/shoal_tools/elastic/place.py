"""The meeting place: agents call it, and it tells them which hosts train together.

It trains nothing and holds no weights. When it ends, ranks go on, and agents call until one
listens there again. All that it knows then it has from them. The rules are in members.py.

Cost: a thread an agent, which sleeps, and two small messages an agent twice a second.
"""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Sequence
from typing import final

from shoal.core.errors import UsageError
from shoal_tools.elastic.members import Members
from shoal_tools.elastic.messages import FromAgent, Hello, JobOver, Sign, from_agent
from shoal_tools.elastic.wire import Wire
from shoal_tools.launch.entrance import Entrance

PORT = 29480
SIGN_S = 0.5  # between two signs of life
_TURN_S = 0.1
_TOLD_S = 2.0  # time for agents to hear that the job is over
_STRANGERS, _PROOF_S = 128, 10.0  # callers without a proof, and how long they may stay


@final
class MeetingPlace:
    """The process that keeps membership.

    Args:
        address: to listen at; "" for every network of this host.
        port: to listen at; 0 for one that is free.
        token: the job's secret.
        lost_after_s: seconds without a sign of life after which a host is lost.
        say: prints a line.

    Raises:
        UsageError: it cannot listen there.
    """

    def __init__(
        self, address: str, port: int, token: str, lost_after_s: float, say: Callable[[str], None]
    ) -> None:
        try:
            listener = _listening(address, port)
        except OSError as error:
            raise UsageError(
                "the meeting place cannot listen",
                where=f"{address or 'every address'}, port {port}",
                got=str(error),
                do="give another --port, or end the program that has it",
            ) from error
        self._listener = listener
        self.port = int(listener.getsockname()[1])
        self._token = token
        self._members = Members(lost_after_s, say)
        self._entrance = Entrance([listener], self._serve, _STRANGERS, _PROOF_S, "shoal agents")
        self._said: queue.SimpleQueue[tuple[str, Wire, FromAgent | None]] = queue.SimpleQueue()
        self._wires: dict[str, Wire] = {}  # the newest of each agent

    def run(self, interrupted: Sequence[int] = ()) -> JobOver | None:
        """Keep membership until the job is over, or `interrupted` has something in it."""
        self._entrance.open()
        try:
            signed_s, until_s = 0.0, float("inf")
            while not interrupted and time.monotonic() < until_s:
                self._hear()
                now_s = time.monotonic()
                for agent, message in self._members.turn(now_s):
                    if (wire := self._wires.get(agent)) is not None:
                        wire.send(message)
                if now_s - signed_s > SIGN_S:
                    signed_s = now_s
                    self._sign()
                if self._members.over is not None and until_s == float("inf"):
                    until_s = now_s + _TOLD_S
            return self._members.over
        finally:
            self._entrance.close()
            for wire in self._wires.values():
                wire.end()

    def forget(self) -> None:
        """Close the port in this process: a fork serves there."""
        self._listener.close()

    def _sign(self) -> None:
        """Send a sign of life to all, and hang up where nobody is any more."""
        here = {*self._members.agents}
        for agent, wire in list(self._wires.items()):
            wire.send(Sign())
            if agent not in here and self._members.over is None:
                self._wires.pop(agent).end()

    def _hear(self) -> None:
        """Take all that agents have said, and wait a turn for the first message."""
        wait_s = _TURN_S
        while True:
            try:
                agent, wire, message = self._said.get(timeout=wait_s)
            except queue.Empty:
                return
            wait_s, now_s = 1e-3, time.monotonic()
            if isinstance(message, Hello):
                self._wires[agent] = wire
            if self._wires.get(agent) is not wire:
                continue  # an older connection of an agent that has called again
            if message is None:
                self._members.broke(agent, now_s)
            else:
                self._members.hear(agent, message, now_s)

    def _serve(self, caller: socket.socket) -> None:
        """Read one caller on a thread of its own. Put out whoever does not know the token."""
        try:
            wire = Wire(caller)
        except OSError:  # no file is left
            return
        agent = ""
        try:
            wire.prove(self._token, asks_first=True)
            if not self._entrance.admit(caller):
                return
            while True:
                message = from_agent(wire.read())
                agent = message.agent if isinstance(message, Hello) else agent
                self._said.put((agent, wire, message))
        except Exception:  # whatever a stranger sends, and every end of a connection
            return
        finally:
            wire.close()
            if agent:
                self._said.put((agent, wire, None))


def _listening(address: str, port: int) -> socket.socket:
    if address:
        where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where[4][:2], family=where[0], backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
        )
    return socket.create_server(("", port), backlog=128)
