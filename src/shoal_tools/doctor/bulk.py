"""Bulk data on a connection between two doctors: whether all bytes come, and how fast."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress

from shoal_tools.doctor.line import Line

_END_S = 2.5  # seconds for the other side to report its measurement
_CHUNK = memoryview(bytes(1 << 18))
_WARM_UP = 0.3  # part of a measurement in which TCP finds its pace


def take(line: Line, size: int) -> None:
    """Receive a number of bytes.

    Raises:
        OSError: the bytes do not come in time.
    """
    deadline = time.monotonic() + line.timeout_s
    taken, line.rest = len(line.rest), b""
    while taken < size:
        data = line.connection.recv(1 << 16)
        taken += len(data)
        if not data:
            raise ConnectionError("the connection ended")
        if time.monotonic() > deadline:
            raise TimeoutError


def pour(line: Line, seconds: float) -> float | None:
    """Send until the other side has measured enough.

    Returns:
        Bytes per second, by the other side's measurement; None if it ends the connection.
    """
    deadline, poll = time.monotonic() + seconds + _END_S, select.poll()
    connection = line.connection
    connection.setblocking(False)
    poll.register(connection, select.POLLIN | select.POLLOUT)
    with suppress(ConnectionError, BlockingIOError):
        while time.monotonic() < deadline:
            for _, events in poll.poll(500):
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    connection.settimeout(_END_S)
                    return line.hear(float)
                with suppress(BlockingIOError):
                    connection.send(_CHUNK)
    return None


def rate_in(connection: socket.socket, seconds: float) -> float:
    """Return the incoming bytes per second, once TCP has found its pace."""
    buffer = bytearray(1 << 18)
    connection.settimeout(seconds + 1.0)
    count, first_s, last_s = 0, 0.0, 0.0
    began = time.perf_counter()
    with suppress(TimeoutError):
        while (now := time.perf_counter()) - began < seconds:
            received = connection.recv_into(buffer)
            now = time.perf_counter()
            if not received:
                break
            if now - began < _WARM_UP * seconds:
                continue
            if not first_s:
                first_s = now
            else:
                count, last_s = count + received, now
    return count / (last_s - first_s) if last_s > first_s else 0.0
