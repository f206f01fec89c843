"""Connections between an agent and the meeting place: a line, and one of sockets.

Both sides of a wire prove first that they know the token, by a challenge of HMAC, as at a desk of
ranks (launch/desk.py). Each message has its length before it. A connection that is silent is ended
by whoever waits for it.
"""

from __future__ import annotations

import os
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, final

from shoal_tools.elastic.messages import MOST_BYTES, Message, write

CONNECT_S, PROOF_S = 1.5, 5.0  # time to connect, and to prove oneself


class AskedAnew(EOFError):
    """The other side wants another hello, on the same line."""


class AgentLine(ABC):
    """A way for messages, both ways. Any thread may send; one thread reads."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, unless the other side is gone."""

    @abstractmethod
    def read(self) -> bytes:
        """Wait for the next message.

        Raises:
            OSError, EOFError: the other side has hung up.
        """

    @abstractmethod
    def end(self) -> None:
        """Wake the thread that reads, if the line can be made again."""

    @abstractmethod
    def close(self) -> None:
        """Give the line back: by the thread that reads."""


@final
class Wire(AgentLine):
    """One open connection. Any thread may send; one thread reads."""

    def __init__(self, caller: socket.socket) -> None:
        self._socket = caller
        self._connection: Any = Connection(os.dup(caller.fileno()))
        self._sending = threading.Lock()

    def prove(self, token: str, *, asks_first: bool) -> None:
        """Prove that both sides know the token.

        Raises:
            AuthenticationError: the other side has another one.
            OSError, EOFError: it has hung up.
        """
        key = token.encode()
        steps = [deliver_challenge, answer_challenge]
        for step in steps if asks_first else reversed(steps):
            step(self._connection, key)

    def send(self, message: Message) -> None:
        with self._sending, suppress(OSError):
            self._connection.send_bytes(write(message))

    def read(self) -> bytes:
        text: bytes = self._connection.recv_bytes(MOST_BYTES)
        return text

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        with self._sending:
            self._connection.close()
        self._socket.close()


def call(place: tuple[str, int], token: str) -> tuple[Wire, str, str]:
    """Call the meeting place; return the wire, this side's address, and the other side's.

    Raises:
        OSError, EOFError: nobody answers there.
        AuthenticationError: somebody with another token does.
    """
    caller = socket.create_connection(place, timeout=CONNECT_S)
    wire = Wire(caller)
    late = threading.Timer(PROOF_S, wire.end)
    late.daemon = True
    try:
        caller.settimeout(None)
        late.start()
        wire.prove(token, asks_first=False)
        return wire, caller.getsockname()[0], caller.getpeername()[0]
    except BaseException:
        wire.close()
        raise
    finally:
        late.cancel()
