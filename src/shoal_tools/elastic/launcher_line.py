"""An agent's line to the launcher that has started it and keeps membership: a socket for input.

    a line of JSON   a message
    an empty line    the launcher has hung up: it wants another hello
    the end          it is gone

No port is opened, and nothing is proved: the launcher's own connection leads here. Guarded by
tests/tools/elastic/test_launcher_line.py.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import final

from shoal.core.errors import UsageError
from shoal_tools.elastic.messages import MOST_BYTES, Message, write
from shoal_tools.elastic.wire import AgentLine, AskedAnew

_HERE = "127.0.0.1"


@final
class LauncherLine(AgentLine):
    """The line that stands as long as this process does.

    Args:
        number: of the open socket.

    Raises:
        UsageError: it is no socket.
    """

    def __init__(self, number: int) -> None:
        try:
            self._socket = socket.socket(fileno=number)
        except OSError as error:
            raise UsageError(
                "standard input is no launcher",
                got=str(error),
                do="give --rendezvous HOST:PORT; `shoal run --nnodes MIN:MAX` itself gives -",
            ) from error
        self._reading = self._socket.makefile("rb")
        self._sending = threading.Lock()
        self._has_ended = False

    def call(self) -> tuple[AgentLine, str, str]:
        """Return this line, and addresses that say nothing of a network.

        Raises:
            ConnectionError: the launcher is gone.
        """
        if self._has_ended:
            raise ConnectionError("the launcher is gone")
        return self, _HERE, _HERE

    def send(self, message: Message) -> None:
        with self._sending, suppress(OSError):
            self._socket.sendall(write(message) + b"\n")

    def read(self) -> bytes:
        line = self._reading.readline(MOST_BYTES)
        self._has_ended = not line
        if self._has_ended:
            raise EOFError("the launcher is gone")
        if not line.strip():
            raise AskedAnew
        return line

    def end(self) -> None:
        pass

    def close(self) -> None:
        if self._has_ended:
            with self._sending:
                self._reading.close()
                self._socket.close()
