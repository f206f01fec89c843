"""The launcher's side of a connection to one host: through ssh, or a pipe on this machine.

    1  start    ssh runs the host's Python, which reads `host_end.py` from its input
    2  hello    whatever the shell's own files print comes before it, and is dropped
    3  frames   messages and lines come as the far end sends them

Why no thread: one loop of the launcher waits for all hosts at once (`gathered`, and the run's).

Cost: one ssh a host. A few bytes each few seconds tell the host that the launcher is alive.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from shoal.contracts.launcher import TOKEN
from shoal_tools.launch import host_end
from shoal_tools.launch.host_list import SshHost
from shoal_tools.launch.processes import DIE_WITH_PARENT, Interrupts

# Without a password, and noticing a host that is gone. A user's forwarded ports are for one
# session only, so none are opened.
SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ClearAllForwardings=yes"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4"),
)
BEAT_S = 5.0
_KEPT = 1 << 14  # bytes of complaints that are kept
_READ = "import sys; f = open(0, 'rb', 0); n = int(f.readline()); s = b''"
_WHOLE = "\nwhile len(s) < n: s += f.read(n - len(s))"
_RUN = "\nexec(compile(s, 'shoal host', 'exec'), {'__name__': '__main__'})"


@final
class Connection:
    """One host as the launcher reaches it, from `start` until its far end is gone."""

    def __init__(self, host: SshHost, ssh: Sequence[str], python: str) -> None:
        program = _READ + _WHOLE + _RUN
        command: tuple[str, ...] = (python, "-c", program)
        if not host.is_here:
            far = f"exec {shlex.join(command)}"
            command = (*ssh, *SSH_OPTIONS, "--", host.login, far)
        self.host = host
        self.messages: list[dict[str, Any]] = []
        self.complaints = b""  # the words of ssh, the shell or Python
        self.code: int | None = None  # the exit code of ssh, once it has ended
        self._said_hello, self._rest = False, b""
        self._lines: list[tuple[bytes, bytes]] = []
        self._said = b""  # bytes of an agent that speaks to the launcher
        environment = {name: text for name, text in os.environ.items() if name != TOKEN}
        self.process = subprocess.Popen(
            (*DIE_WITH_PARENT, *command),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        source = Path(host_end.__file__).read_bytes()
        self._write(b"%d\n" % len(source) + source)

    @property
    def is_open(self) -> bool:
        """Whether the far end may still say something."""
        return self.code is None

    @property
    def has_come(self) -> bool:
        """Whether the far end has begun."""
        return self._said_hello

    def order(self, **order: Any) -> None:
        """Send an order."""
        self._write(json.dumps(order).encode() + b"\n")

    def read(self) -> None:
        """Read all that has come, without waiting; notice an end."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for pipe in (self.process.stdout, self.process.stderr):
            os.set_blocking(pipe.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                self.complaints = (self.complaints + data)[-_KEPT:]
        with suppress(BlockingIOError):
            while data := os.read(self.process.stdout.fileno(), 1 << 16):
                self._feed(data)
            if self.process.poll() is not None:
                self.code = self.process.returncode

    def take_lines(self) -> list[tuple[bytes, bytes]]:
        """Return the output of ranks since the last call: `o` or `e`, and the bytes."""
        lines, self._lines = self._lines, []
        return lines

    def take_messages(self) -> list[bytes]:
        """Return the messages of the host's agent since the last call."""
        *said, self._said = self._said.split(b"\n")
        return said

    def taken(self, key: str) -> dict[str, Any] | None:
        """Return the first message that has this key, and forget it."""
        for message in self.messages:
            if key in message:
                self.messages.remove(message)
                return message
        return None

    def complaint(self) -> str:
        """Return the last line that ssh, the shell or Python has written."""
        lines = self.complaints.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def close_input(self) -> None:
        """Let the far end know that nothing more comes, on which it ends all."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def end(self, patience_s: float) -> None:
        """Wait for the far end to end all, and then end ssh."""
        deadline = time.monotonic() + patience_s
        while self.is_open and time.monotonic() < deadline:
            self.read()
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        self.code = self.process.returncode
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended, which reading finds
            while data:
                data = data[self.process.stdin.write(data) :]

    def _feed(self, data: bytes) -> None:
        self._rest += data
        if not self._said_hello:
            _, hello, rest = self._rest.partition(host_end.HELLO)
            if not hello:
                return
            self._said_hello, self._rest = True, rest
        while (end := self._rest.find(b"\n")) >= 0:
            kind, length = self._rest[:end].split(b" ")
            whole = end + 1 + int(length)
            if len(self._rest) < whole:
                return
            body, self._rest = self._rest[end + 1 : whole], self._rest[whole:]
            if kind == b"m":
                self.messages.append(json.loads(body))
            elif kind == b"a":
                self._said += body
            else:
                self._lines.append((kind, body))


def gathered(
    connections: Sequence[Connection], key: str, timeout_s: float, interrupts: Interrupts
) -> Mapping[Connection, Any]:
    """Wait for one message of each host; a host that ends or is late is not in the result."""
    found: dict[Connection, Any] = {}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not interrupts.received:
        for connection in connections:
            if message := connection.taken(key):
                found[connection] = message[key]
        missing = [connection for connection in connections if connection not in found]
        if not any(connection.is_open for connection in missing):
            break
        wait(missing, 0.1)
    return found


def wait(connections: Sequence[Connection], seconds: float) -> None:
    """Wait until one of these says something, and read all."""
    poll = select.poll()
    for connection in connections:
        if connection.is_open and connection.process.stdout is not None:
            poll.register(connection.process.stdout, select.POLLIN)
    poll.poll(1000 * seconds)
    for connection in connections:
        if connection.is_open:
            connection.read()
