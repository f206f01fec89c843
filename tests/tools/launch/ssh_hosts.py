"""Two hosts as network namespaces, each with an ssh server, a name and a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from networks import Hosts, Network, up

from shoal_tools.launch.lab import Lab
from shoal_tools.launch.processes import kill_all

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("a", "b")
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))

_SERVER = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PrintMotd no
"""
_CLIENT = """
Host {names}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile none
Host a
  HostName {addresses[0]}
Host b
  HostName {addresses[1]}
Host closed
  HostName 127.0.0.1
  Port 9
Host nowhere
  HostName nowhere.invalid
Host absent
  HostName 10.77.0.77
Host renewed
  HostName {addresses[1]}
  UserKnownHostsFile {folder}/before
"""
# a folder that only this host has, and the server
_START = 'mkdir -p /run/sshd && mount -t tmpfs none "$0" && exec "$@"'


def missing() -> str:
    """Say why such hosts cannot be here; '' if they can."""
    if lacks := Lab().missing():
        return lacks
    return "" if SSHD and shutil.which("ssh") else "no sshd here: openssh-server has it"


@dataclass(frozen=True)
class SshHosts:
    """The hosts, while they are up."""

    hosts: Hosts
    ssh: tuple[str, ...]  # the program that reaches them by name, from the first host's network
    folder: Path  # on each host another one
    servers: tuple[int, ...]

    def processes(self, host: int) -> list[int]:
        """List the processes on a host."""
        said = subprocess.run(
            ("ip", "netns", "pids", self.hosts.namespaces[host]),
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in said.stdout.split()]

    def at(self, host: int, *command: str) -> str:
        """Run a command on a host by ssh."""
        far = (*self.ssh, "-o", "BatchMode=yes", NAMES[host], *command)
        return subprocess.run(far, capture_output=True, text=True, check=True).stdout

    def kill(self, host: int) -> None:
        """Kill all that runs on a host at once, and leave its server for other tests."""
        kill_all(lambda: [pid for pid in self.processes(host) if pid not in self.servers])


@contextmanager
def ssh_hosts(tmp_path: Path) -> Iterator[SshHosts]:
    """Two hosts, a and b, and an ssh that reaches them; nothing is left of them at the end."""
    folder, work = tmp_path / "ssh", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    for name in ("host_key", "key"):
        command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        subprocess.run(command, check=True)
    key = (folder / "host_key.pub").read_text()
    (folder / "known").write_text("".join(f"{address} {key}" for address in ADDRESSES))
    (folder / "before").write_text(f"{ADDRESSES[1]} {(folder / 'key.pub').read_text()}")
    client = _CLIENT.format(names=" ".join(NAMES), folder=folder, addresses=ADDRESSES)
    (folder / "client").write_text(client)
    lines = tuple(f"{address} {name}" for address, name in zip(ADDRESSES, NAMES, strict=True))
    network = Network("eth0", (f"{ADDRESSES[0]}/24", f"{ADDRESSES[1]}/24"))
    with up(Hosts((network,), (lines, lines))) as hosts:
        servers = [_server(hosts, host, folder, work) for host in (0, 1)]
        try:
            inside = ("ip", "netns", "exec", hosts.namespaces[0])
            ssh = (*inside, "ssh", "-F", str(folder / "client"))
            up_hosts = SshHosts(hosts, ssh, work, tuple(server.pid for server in servers))
            _wait_for_servers(up_hosts, servers)
            yield up_hosts
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _server(hosts: Hosts, host: int, folder: Path, work: Path) -> subprocess.Popen[bytes]:
    config = folder / f"server{host}"
    config.write_text(_SERVER.format(address=ADDRESSES[host], folder=folder))
    assert SSHD is not None
    own = ("unshare", "--mount", "sh", "-c", _START, str(work))
    command = hosts.command(host, *own, SSHD, "-D", "-e", "-f", str(config))
    with (folder / f"log{host}").open("w") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_for_servers(hosts: SshHosts, servers: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 30
    for host in (0, 1):
        while time.monotonic() < deadline:
            with suppress(subprocess.CalledProcessError):
                hosts.at(host, "true")
                break
            assert servers[host].poll() is None, "the ssh server has ended"
            time.sleep(0.05)
