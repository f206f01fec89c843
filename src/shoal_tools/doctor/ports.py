"""Ports of this host, as the kernel lists them, with the programs and hosts that use them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TORCHRUN_PORT = 29500  # port where ranks meet by default
_LISTENS, _ASKED = "0A", "03"  # states of sockets, in /proc/net/tcp


@dataclass(frozen=True)
class Taken:
    """Port that a start needs, and the process that listens there."""

    port: int
    pid: int
    program: str


def listener_at(port: int) -> Taken | None:
    """Return the process that listens at a port of this host, if there is one."""
    inodes = {f"socket:[{fields[9]}]" for fields in _sockets(port, _LISTENS)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                if os.readlink(descriptor) in inodes:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    return Taken(port, int(process.name), command.decode(errors="replace").strip())
    return Taken(port, 0, "a process of another user")


def taken_ports(ports: Iterable[int]) -> Iterator[Taken]:
    """Yield the ports that a process other than a launcher of this one has taken."""
    launchers = set(_ancestors())
    for port in ports:
        taken = listener_at(port)
        if taken is not None and taken.pid not in launchers:
            yield taken


def asking(port: int) -> set[str]:
    """Return the addresses of requests for a connection that have not received our answer."""
    return {_address(fields[2].partition(":")[0]) for fields in _sockets(port, _ASKED)}


def _sockets(port: int, state: str) -> Iterator[list[str]]:
    """Yield the kernel's rows of the sockets at a port that are in a state."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/thread-self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields


def _address(digits: str) -> str:
    """Decode an address of the kernel's: words of four bytes, each with its last byte first."""
    packed = bytes.fromhex(digits)
    words = struct.unpack(f"<{len(packed) // 4}I", packed)
    packed = struct.pack(f">{len(words)}I", *words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:")


def _ancestors() -> Iterator[int]:
    process = os.getpid()
    with suppress(OSError):
        while process > 1:
            yield process
            status = Path(f"/proc/{process}/stat").read_text()
            process = int(status.rpartition(")")[2].split()[1])
