"""Network interfaces of this host, and the one that leads to another host.

Why here: hosts find each other only through an interface that leads from one to the other. The name
of a host often leads elsewhere: to 127.0.1.1 on Debian as installed, or to a network of containers.

Cost: some system calls, no process. Linux only; elsewhere no interface is known.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "linux":
    import fcntl

_IPV6 = Path("/proc/thread-self/net/if_inet6")  # a thread may be in a network of its own
_ADDRESS, _FLAGS, _MTU = 0x8915, 0x8913, 0x8921  # SIOCGIFADDR, SIOCGIFFLAGS, SIOCGIFMTU
_UP = 0x1
_LINK_LOCAL = "20"  # an IPv6 address that is incomplete without its interface
# interfaces of this machine alone: its loopback, and links to its own containers and virtual
# machines
_OWN = re.compile(
    r"lo\d*|(docker|virbr|veth|cni|podman|lxcbr|lxdbr|flannel|cali|kube).*|br-[0-9a-f]{12}"
)


@dataclass(frozen=True)
class Address:
    """One address of this host, and its interface."""

    interface: str
    text: str

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.text

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.text)


def own_addresses() -> tuple[Address, ...]:
    """Return the first IPv4 address and all IPv6 addresses of each interface that is up."""
    if sys.platform != "linux":
        return ()
    up = [name for name in names() if (_number(name, _FLAGS, "H") or 0) & _UP]
    return tuple(address for address in (*_ipv4(), *_ipv6()) if address.interface in up)


def names() -> list[str]:
    """Return the interfaces of this host, also the ones that are down."""
    return [name for _, name in socket.if_nameindex()]


def interface_of(address: str) -> str | None:
    """Return the interface that has this address, or None."""
    return next((each.interface for each in own_addresses() if each.text == address), None)


def source_towards(address: str, port: int = 9) -> str | None:
    """Return the address from which this host sends to another; None if no route leads there.

    Nothing is sent.

    Args:
        address: the other host's address or name.
        port: any port.
    """
    for family, kind, protocol, _, place in _resolve(address, port):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(place)
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def mtu(interface: str) -> int | None:
    """Return the largest packet that an interface takes, in bytes."""
    return _number(interface, _MTU, "i")


def is_loopback(address: str) -> bool:
    """Return whether an address leads back to the host that uses it."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def stays_here(interface: str) -> bool:
    """Return whether an interface is the loopback, or joins only containers of this machine."""
    return _OWN.fullmatch(interface) is not None


def _resolve(address: str, port: int) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except (OSError, UnicodeError):
        return []


def _ipv4() -> Iterator[Address]:
    for name in names():
        found = _ask(name, _ADDRESS)
        if found is not None:
            yield Address(name, socket.inet_ntoa(found[20:24]))


def _ipv6() -> Iterator[Address]:
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope != _LINK_LOCAL:
            yield Address(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))


def _number(interface: str, request: int, kind: str) -> int | None:
    found = _ask(interface, request)
    return None if found is None else int(struct.unpack_from(kind, found, 16)[0])


def _ask(interface: str, request: int) -> bytes | None:
    """Return the kernel's answer about an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            asked = struct.pack("256s", interface.encode()[:15])
            return fcntl.ioctl(any_socket.fileno(), request, asked)
        except OSError:
            return None
