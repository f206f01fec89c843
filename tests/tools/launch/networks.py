"""Two hosts as network namespaces, whose networks, addresses and names are as a test wants them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal_tools.launch.namespaces import SETTINGS, claim, execute, take_down

SHARED = "shared"  # the network that leads to the other host


@dataclass(frozen=True)
class Network:
    """One interface of both hosts: `eth0`, with an address on each; it leads anywhere, or not."""

    interface: str
    addresses: tuple[str, str]  # with the length of the prefix
    leads_nowhere: bool = False


@dataclass(frozen=True)
class Hosts:
    """Two hosts. `names[host]` are the lines of its /etc/hosts, behind those for localhost."""

    networks: tuple[Network, ...]
    names: tuple[Sequence[str], Sequence[str]]
    namespaces: tuple[str, ...] = field(default=())

    def command(self, host: int, *argv: str) -> tuple[str, ...]:
        """The command, to run on a host, which is called h0 or h1."""
        named = ("unshare", "--uts", "sh", "-c", f'hostname h{host}; exec "$@"', "sh")
        return ("ip", "netns", "exec", self.namespaces[host], *named, *argv)

    def start(
        self, host: int, argv: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a process there, whose output is kept; nothing names an interface or a host."""
        unset = ("GLOO_SOCKET_IFNAME", "SHOAL_HOST", "SHOAL_JOB", "TORCHELASTIC_RUN_ID")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.Popen(
            self.command(host, *argv),
            env={**environment, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def up(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts, built; taken down at the end with all that runs there."""
    prefix = claim("h0")
    namespaces = (f"{prefix}-h0", f"{prefix}-h1")
    try:
        execute("ip", "netns", "add", namespaces[1])
        for host, namespace in enumerate(namespaces):
            (SETTINGS / namespace).mkdir(parents=True, exist_ok=True)
            lines = ("127.0.0.1 localhost", "::1 localhost ip6-localhost", *hosts.names[host])
            (SETTINGS / namespace / "hosts").write_text("\n".join(lines) + "\n")
            _ip(namespace, "link set lo up")
        for network in hosts.networks:
            _connect(network, namespaces)
        yield Hosts(hosts.networks, hosts.names, namespaces)
    finally:
        take_down(namespaces)


def _connect(network: Network, namespaces: Sequence[str]) -> None:
    """Join both hosts by a cable, or give each a cable whose other end nobody reads."""
    name, other = network.interface, f"{network.interface}x"
    if network.leads_nowhere:
        for namespace in namespaces:
            _ip(namespace, f"link add {name} type veth peer name {other}")
            _ip(namespace, f"link set {other} up")
    else:
        _ip(namespaces[0], f"link add {name} type veth peer name {name} netns {namespaces[1]}")
    for namespace, address in zip(namespaces, network.addresses, strict=True):
        nodad = " nodad" if ":" in address else ""
        _ip(namespace, f"address add {address} dev {name}{nodad}")
        _ip(namespace, f"link set {name} up")


def _ip(namespace: str, command: str) -> None:
    execute("ip", "-n", namespace, *command.split())
