"""Program of a rank's pulse: it reports the state of the rank's process, and ends with it.

    python -I -S pulse_child.py LISTENER PID    the number of an open socket, the rank's process

    16 bytes from an asker  ──▶  the process's state, as in /proc/PID/stat, and an HMAC of both

The secret is SHOAL_TOKEN. The program imports neither the library nor PyTorch. It takes 20 ms to
start and 10 MB, and no processor time while it is not asked. Guarded by tests/comm/test_pulse.py.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import signal
import socket
import sys
from contextlib import suppress

DOMAIN = b"shoal pulse\0"  # the first word under a signature, which no other protocol has
ASKED_BYTES, SIGNED_BYTES = 16, 32
_MOST = 64  # most open connections: for another one the oldest is closed
_LOOK_S = 1.0  # seconds between two looks for the process, if the kernel does not report its end


def main(listener_number: int, process: int) -> None:
    """Answer questions until the process ends."""
    # these signals are for the rank, and this program ends with it
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    listener = socket.socket(fileno=listener_number)
    listener.setblocking(False)
    end = _ending(process)
    asking: dict[int, tuple[socket.socket, bytes]] = {}
    # opened early, because strangers may use up all files later
    stat = os.open(f"/proc/{process}/stat", os.O_RDONLY)
    while os.getppid() == process:
        watched = [listener.fileno(), *asking, *end]
        ready, _, _ = select.select(watched, [], [], None if end else _LOOK_S)
        if set(end) & set(ready):
            return
        for number in ready:
            if number == listener.fileno():
                _accept(listener, asking)
            elif number in asking:
                _hear(stat, number, asking)


def _ending(process: int) -> list[int]:
    """Return a file that becomes readable when the process ends, in a list; empty if there is
    none.
    """
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def _accept(listener: socket.socket, asking: dict[int, tuple[socket.socket, bytes]]) -> None:
    try:
        connection, _ = listener.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE) and asking:
            _close_oldest(asking)
        return
    connection.setblocking(False)
    while len(asking) >= _MOST:
        _close_oldest(asking)
    asking[connection.fileno()] = connection, b""


def _close_oldest(asking: dict[int, tuple[socket.socket, bytes]]) -> None:
    asking.pop(next(iter(asking)))[0].close()


def _hear(stat: int, number: int, asking: dict[int, tuple[socket.socket, bytes]]) -> None:
    connection, before = asking.pop(number)
    with suppress(OSError):
        more = connection.recv(ASKED_BYTES - len(before))
        asked = before + more
        if more and len(asked) < ASKED_BYTES:
            asking[number] = connection, asked
            return
        if more:
            connection.send(answer(asked, state_in(stat), os.environ.get("SHOAL_TOKEN", "")))
    connection.close()


def answer(asked: bytes, state: bytes, token: str) -> bytes:
    """Return the state, signed for this question."""
    return state + hmac.digest(token.encode(), DOMAIN + asked + state, "sha256")


def state_in(stat: int) -> bytes:
    """Read the letter of a process's state: R runs, S sleeps, D waits for a device, T is stopped.

    Args:
        stat: the process's file in /proc, open. The kernel writes it anew for each read.
    """
    # the process's name may contain anything
    return os.pread(stat, 4096, 0).rpartition(b") ")[2][:1]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
