"""Ports at which nobody listens, so that tests run side by side."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return one on this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
