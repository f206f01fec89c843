"""The connections between ranks on other hosts and the driver: lines, exit codes and signals.

    rank -> driver      its name in words · its output · its exit code
    driver -> rank      go · a signal for its processes

Both prove first that they know the job's token, by a challenge of HMAC. It is the standard
library's, and no other signature of Shoal's has that form. Messages are plain bytes, and the first
byte is their kind. A connection that closes before the exit code tells the driver that the rank's
executor is gone. It tells the rank that the driver is gone.

Silent strangers are put out after 10 s, or as soon as there are too many of them (entrance.py). A
rank that was put out among them comes again (`call_desk`).

Cost: a thread a rank at the driver, which sleeps while no message comes.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from types import TracebackType
from typing import Any

from shoal_tools.launch.entrance import Entrance

HELLO, OUT, ERR, EXIT = b"h", b"o", b"e", b"x"  # messages of a rank
GO, SIGNAL = b"g", b"s"  # messages of the driver
LOST = b"l"  # the desk's own message: the connection has closed
MOST_BYTES = 1 << 17  # bytes of a message
_STRANGERS = 64  # connections without a proof, beside one a rank
_PROOF_S = 10.0  # how long such a connection lasts
_CALL_S, _AGAIN_S = 30.0, 0.2  # how long, and how often, a rank calls that is put out


@dataclass(frozen=True)
class Said:
    """One thing that came from a rank."""

    rank: int
    kind: bytes
    data: bytes = b""


class Desk:
    """The driver's side, from the beginning of the block to its end.

    Args:
        address: which it listens at, on a free port.
        token: the job's.
        ranks: how many there are.
    """

    def __init__(self, address: str, token: str, ranks: int) -> None:
        where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[4][:2], family=where[0], backlog=128)
        self.port = int(listener.getsockname()[1])
        self._entrance = Entrance(
            [listener], self._hear, ranks + _STRANGERS, _PROOF_S, "shoal desk"
        )
        self._key, self._ranks = token.encode(), ranks
        self._said: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._open: dict[int, Connection[Any, Any]] = {}  # ranks' connections
        self._admitted: dict[int, socket.socket] = {}  # the sockets below them

    def __enter__(self) -> Desk:
        self._entrance.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._entrance.close()
        for each in list(self._admitted.values()):
            with suppress(OSError):  # the other side has left already
                each.shutdown(socket.SHUT_RDWR)  # this wakes its thread, which closes it

    def next(self, within_s: float) -> Said | None:
        """Return the next message, or None if none comes in time."""
        try:
            return self._said.get(timeout=within_s)
        except queue.Empty:
            return None

    def tell(self, rank: int, message: bytes) -> None:
        """Tell a rank, unless it is gone."""
        with suppress(OSError, KeyError):
            self._open[rank].send_bytes(message)

    def _hear(self, caller: socket.socket) -> None:
        """Hear everything that one connection says, until it closes. Ignore strangers."""
        try:
            connection: Any = Connection(os.dup(caller.fileno()))
        except OSError:  # no file is left
            return
        with connection:
            try:
                deliver_challenge(connection, self._key)
                is_admitted = self._entrance.admit(caller)
                answer_challenge(connection, self._key)
                number, _, words = connection.recv_bytes(MOST_BYTES).partition(b" ")
                rank = int(number)
            except Exception:  # a stranger may send anything
                return
            if is_admitted and rank not in self._open and 0 <= rank < self._ranks:
                self._open[rank], self._admitted[rank] = connection, caller
                self._hear_rank(rank, words, connection)

    def _hear_rank(self, rank: int, words: bytes, connection: Any) -> None:
        self._said.put(Said(rank, HELLO, words))
        with suppress(OSError, EOFError):
            while message := connection.recv_bytes(MOST_BYTES):
                self._said.put(Said(rank, message[:1], message[1:]))
        self._said.put(Said(rank, LOST))


def call_desk(desk: tuple[str, int], token: str) -> Connection[Any, Any]:
    """Connect a rank to the driver's desk; both prove that they know the token.

    Strangers may fill the desk, so that it puts the rank out, which then calls again.

    Raises:
        OSError: the desk is not reached.
        AuthenticationError: a program with another token answers.
    """
    deadline = time.monotonic() + _CALL_S
    while True:
        try:
            return Client(desk, authkey=token.encode())
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the connection ended: {error!r}") from error
            time.sleep(_AGAIN_S)
