"""Hosts as they come: names that lead to themselves, networks that lead nowhere, IPv6 alone.

Nobody sets a variable that names an interface.
"""

from __future__ import annotations

import sys

import pytest
from networks import Hosts, Network, up

from shoal_tools.launch.lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.processes,
    pytest.mark.skipif(Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"),
]

# Joins, and sums over the ranks; also in a group that the program makes itself.
RANK = """
import os, socket, torch
import torch.distributed as dist
import shoal
from shoal.session.session import current

world = shoal.init(timeout_s=60, start_timeout_s=60)
ones = torch.ones(1000)
current().comm.channel("lane").all_reduce(ones)
dist.all_reduce(ones, group=dist.new_group())
print("sum", ones.sum().item(), "as", world.host, "by", os.environ.get("GLOO_SOCKET_IFNAME"))
"""

ONE = Network("eth0", ("10.0.0.1/24", "10.0.0.2/24"))
DEAD = Network("eth0", ("192.168.7.1/24", "192.168.7.2/24"), leads_nowhere=True)
LIVE = Network("eth1", ("10.0.0.1/24", "10.0.0.2/24"))
IPV6 = Network("eth0", ("fd00::1/64", "fd00::2/64"))

DEBIAN = Hosts((ONE,), (["127.0.1.1 h0", "10.0.0.2 h1"], ["127.0.1.1 h1", "10.0.0.1 h0"]))
# each host's own name means the network that leads nowhere
TWO = Hosts((DEAD, LIVE), (["192.168.7.1 h0"], ["192.168.7.2 h1", "192.168.7.1 h0", "10.0.0.1 h0"]))
IPV6_ONLY = Hosts((IPV6,), (["fd00::1 h0"], ["fd00::2 h1", "fd00::1 h0"]))
IPV6_DEBIAN = Hosts((IPV6,), (["127.0.1.1 h0"], ["127.0.1.1 h1", "fd00::1 h0"]))

CASES = {
    "Debian's names": (DEBIAN, "h0", "eth0"),
    "Debian's names, an address": (DEBIAN, "10.0.0.1", "eth0"),
    "two networks": (TWO, "10.0.0.1", "eth1"),
    "two networks, a name": (TWO, "h0", "eth1"),
    "IPv6 only": (IPV6_ONLY, "fd00::1", "eth0"),
    "IPv6 only, a name": (IPV6_ONLY, "h0", "eth0"),
    "IPv6 only, Debian's names": (IPV6_DEBIAN, "h0", "eth0"),
}
QUICK = ("Debian's names",)


def started(hosts: Hosts, address: str, launcher: str) -> list[str]:
    """What each host has printed; the processes have ended with 0."""
    processes = []
    for host in range(2):
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
        command, variables = (sys.executable, "-c", RANK), {**meeting, "RANK": str(host)}
        if launcher == "torchrun":
            agent = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2")
            where = (f"--node-rank={host}", f"--master-addr={address}", "--master-port=29511")
            command, variables = (*agent, *where, "--no-python", *command), {}
        processes.append(hosts.start(host, command, variables))
    try:
        printed = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.parametrize(
    ("case", "launcher"),
    [
        pytest.param(name, launcher, marks=[] if quick else [pytest.mark.slow])
        for name in CASES
        for launcher in ("by hand", "torchrun")
        for quick in [name in QUICK and launcher == "by hand"]
    ],
)
def test_ranks_join_without_a_word_about_the_network(case: str, launcher: str) -> None:
    hosts, address, interface = CASES[case]
    with up(hosts) as there:
        printed = started(there, address, launcher)
    for host, lines in enumerate(printed):
        assert f"sum 4000.0 as h{host} by {interface}" in lines, lines
