"""What ranks elsewhere tell the driver, and what it tells them: lines, exit codes and signals.

    rank -> driver      who it is, in words · what it prints · its exit code
    driver -> rank      go · a signal for its processes

Both prove first that they know the job's token, by a challenge of HMAC. Messages are plain bytes,
whose first one says what they are. A connection that closes before the exit code means that the
rank's executor is gone; at the rank, that the driver is.

Cost: a thread a rank at the driver, which sleeps while nothing is said.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
)
from types import TracebackType
from typing import Any

HELLO, OUT, ERR, EXIT = b"h", b"o", b"e", b"x"  # of a rank
GO, SIGNAL = b"g", b"s"  # of the driver
LOST = b"l"  # what the desk itself finds: the connection has closed
MOST_BYTES = 1 << 17  # of a message


@dataclass(frozen=True)
class Said:
    """One thing that came from a rank."""

    rank: int
    kind: bytes
    data: bytes = b""


class Desk:
    """The driver's side, while the block is not left.

    Args:
        address: which it listens at, on a free port.
        token: the job's.
        ranks: how many there are.
    """

    def __init__(self, address: str, token: str, ranks: int) -> None:
        where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[4][:2], family=where[0], backlog=128)
        self._sockets: list[socket.socket] = []  # all that were accepted, also of strangers
        self._key, self._ranks = token.encode(), ranks
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._open: dict[int, Connection[Any, Any]] = {}

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Desk:
        threading.Thread(target=self._accept, name="shoal desk", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for each in (self._listener, *list(self._sockets)):  # this wakes who waits on it
            with suppress(OSError):  # the other side has left already
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def next(self, within_s: float) -> Said | None:
        """What comes next, if something does."""
        try:
            return self._said.get(timeout=within_s)
        except queue.Empty:
            return None

    def tell(self, rank: int, message: bytes) -> None:
        """Tell a rank, unless it is gone."""
        with suppress(OSError, KeyError):
            self._open[rank].send_bytes(message)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._sockets.append(accepted)
            connection: Any = Connection(os.dup(accepted.fileno()))
            threading.Thread(
                target=self._hear, args=(connection, accepted), name="shoal desk", daemon=True
            ).start()

    def _hear(self, connection: Any, accepted: socket.socket) -> None:
        """Everything that one connection says, until it closes."""
        with connection:
            self._hear_rank(connection)
        accepted.close()
        with suppress(ValueError):  # the desk is being left
            self._sockets.remove(accepted)

    def _hear_rank(self, connection: Any) -> None:
        """What is no rank is not heard."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            number, _, words = connection.recv_bytes(MOST_BYTES).partition(b" ")
            rank = int(number)
        except Exception:  # whatever a stranger sends
            return
        if rank in self._open or not 0 <= rank < self._ranks:
            return
        self._open[rank] = connection
        self._said.put(Said(rank, HELLO, words))
        with suppress(OSError, EOFError):
            while message := connection.recv_bytes(MOST_BYTES):
                self._said.put(Said(rank, message[:1], message[1:]))
        self._said.put(Said(rank, LOST))
