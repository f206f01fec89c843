"""Closes the ports at which gloo waits for ranks, once all of them have connected.

Gloo listens for as long as its group lives. It keeps each connection that a stranger opens, and
ends the process when it can keep no more (tests/faults/test_strangers.py). So the kernel is told to
drop all packets that arrive at such a port. Connections that stand already go on.

Linux only; elsewhere ports stay open. Source: man 7 socket, SO_ATTACH_FILTER.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 6, 0, 0, 0)  # one instruction of the packet filter: return 0 bytes


def close_ports(told: Sequence[bytes]) -> None:
    """Close this process's listening sockets to new connections, if other ranks were told their
    address.
    """
    instructions = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    for listening in _listening():
        with listening, suppress(OSError):
            place = _place(listening)
            if any(place in each for each in told):
                listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _listening() -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process that listens on a network."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    continue
                found = socket.socket(fileno=os.dup(int(name)))
                listens = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
                if listens:
                    yield found
                else:
                    found.close()


def _place(listening: socket.socket) -> bytes:
    """Return a socket's address in C's form: family, port, and then the address."""
    address, port = listening.getsockname()[:2]
    head = struct.pack("=H", listening.family) + struct.pack("!H", port)
    flow = b"" if listening.family == socket.AF_INET else bytes(4)
    return head + flow + socket.inet_pton(listening.family, address.partition("%")[0])
