"""Facts that a host reports about itself: addresses, names, versions, limits and obstacles."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.contracts.versions import Versions, versions
from shoal.core.interfaces import (
    Address,
    interface_of,
    is_loopback,
    mtu,
    names,
    own_addresses,
    source_towards,
    stays_here,
)
from shoal_tools.doctor.deadline import all_within
from shoal_tools.doctor.ports import TORCHRUN_PORT, Taken, taken_ports
from shoal_tools.doctor.wire import plain

_NAMES_S = 2.5  # a name server may be away
_TOOL_S = 2.0
_SHARED = "/dev/shm"
_PINS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
_SHAPERS = ("tbf", "htb", "netem", "cake", "hfsc")


@dataclass(frozen=True)
class Chain:
    """Chain of nftables that filters incoming or outgoing packets."""

    family: str
    table: str
    name: str
    hook: str


@dataclass(frozen=True)
class Firewall:
    """Possible filters of packets: programs that keep rules, and the rules that can be read."""

    tools: tuple[str, ...]
    chains: tuple[Chain, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Limits of this process and host."""

    files: int  # files that may be open at once
    most_files: int  # limit that the process may ask for
    shared_bytes: int
    shared_free_bytes: int


@dataclass(frozen=True)
class Interfaces:
    """Network interfaces of a host."""

    names: tuple[str, ...]
    asked: tuple[str, ...]  # names in GLOO_SOCKET_IFNAME
    mtus: dict[str, int]
    shaped: tuple[str, ...]  # interfaces with a rate that tc limits


@dataclass(frozen=True)
class Host:
    """One host, as a process on it sees it."""

    id: str  # id of its doctor
    rank: int
    name: str
    machine: str  # equal for processes that share a network
    addresses: tuple[Address, ...]
    announced: str  # the address that others are told; "" for none
    interfaces: Interfaces
    names: dict[str, tuple[str, ...]]  # addresses that names of hosts lead to on this host
    port: int  # the doctor's port
    versions: Versions
    limits: Limits
    firewall: Firewall
    taken: tuple[Taken, ...] = ()
    pinned: str = ""  # environment variables that restrict the processor's instructions

    def interface_of(self, address: str) -> str:
        """Return the interface that has this address, or ""."""
        return next((each.interface for each in self.addresses if each.text == address), "")

    @property
    def outer(self) -> tuple[Address, ...]:
        """Addresses that other hosts may reach."""
        return tuple(a for a in self.addresses if not a.is_loopback and not stays_here(a.interface))


def resolved(hosts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the addresses that names of hosts lead to here; none if they lead nowhere in time."""
    wanted = {name: partial(_addresses, name) for name in hosts if name}
    found = all_within(_NAMES_S, wanted)
    return {name: found.get(name, ()) for name in wanted}


def here(
    id: str, port: int, *, rank: int = 0, name: str, asked: str, towards: str, known: Iterable[str]
) -> Host:
    """Collect this host's report about itself.

    Args:
        id, port: id and port of its doctor.
        rank: its number among the hosts.
        name: its name.
        asked: interfaces that the user asks for, with commas (GLOO_SOCKET_IFNAME).
        towards: the address or name of a host that it must reach; "" for none.
        known: names of hosts that a start uses.
    """
    wanted = tuple(filter(None, asked.split(",")))
    addresses, all_names = own_addresses(), tuple(names())
    return Host(
        id=id,
        rank=rank,
        name=name,
        machine=machine(),
        addresses=addresses,
        announced=_own_address(wanted, towards, addresses),
        interfaces=Interfaces(
            names=all_names,
            asked=wanted,
            mtus={each: mtu(each) or 0 for each in all_names},
            shaped=tuple(_shape(all_names)),
        ),
        names=resolved(known),
        port=port,
        versions=versions(),
        limits=_limits(),
        firewall=_firewall(),
        taken=tuple(taken_ports([TORCHRUN_PORT])),
        pinned=" ".join(f"{name}={os.environ[name]}" for name in _PINS if os.environ.get(name)),
    )


def machine() -> str:
    """Return a name of this machine's network: equal for processes that share a loopback."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/thread-self/ns/net').st_ino}"
    return socket.gethostname()


def _addresses(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(plain(str(place[0])) for *_, place in found))


def _own_address(asked: tuple[str, ...], towards: str, addresses: tuple[Address, ...]) -> str:
    """Choose the address to tell others: of the requested interface, or of the way towards a
    host.
    """
    for interface in asked:
        found = [each.text for each in addresses if each.interface == interface]
        if found:
            return found[0]
    if asked:
        return ""
    source = plain(source_towards(towards) or "") if towards else ""
    if source and not is_loopback(source) and interface_of(source):
        return source
    outer = [a.text for a in addresses if not a.is_loopback and not stays_here(a.interface)]
    return next(iter(outer), source)


def _limits() -> Limits:
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 20
    files, most_files = (
        unlimited if limit == resource.RLIM_INFINITY else limit for limit in (files, most_files)
    )
    try:
        shared = os.statvfs(_SHARED)
    except OSError:
        return Limits(files, most_files, 0, 0)
    size = shared.f_frsize
    return Limits(files, most_files, shared.f_blocks * size, shared.f_bavail * size)


def _firewall() -> Firewall:
    tools = ("ufw", "firewall-cmd", "nft", "iptables")
    there = tuple(tool for tool in tools if shutil.which(tool))
    return Firewall(there, tuple(_chains()) if "nft" in there else ())


def _chains() -> Iterator[Chain]:
    """Yield nftables' chains, which only root may read."""
    try:
        listed = json.loads(_output_of("nft", "--json", "list", "chains") or "{}")
    except ValueError:
        return
    for entry in listed.get("nftables", ()):
        chain = entry.get("chain", {})
        if chain.get("hook") in ("input", "output"):
            yield Chain(chain["family"], chain["table"], chain["name"], chain["hook"])


def _shape(interfaces: Iterable[str]) -> Iterator[str]:
    for line in _output_of("tc", "qdisc", "show").splitlines():
        words = line.split()  # qdisc KIND HANDLE dev INTERFACE …
        if len(words) > 4 and words[1] in _SHAPERS and words[4] in interfaces:
            yield words[4]


def _output_of(*command: str) -> str:
    """Return a program's output, or "" if it does not exist, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True)
        return done.stdout
    return ""
