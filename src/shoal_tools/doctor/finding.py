"""Findings: each names a fault, its place, and the one command that mends it."""

from __future__ import annotations

from dataclasses import dataclass

CHECKS = {  # questions of all checks, by the names that --ignore takes
    "start": "does every rank come to the start",
    "names": "do names of hosts lead to hosts",
    "ipv6": "has every host an IPv4 address",
    "interface": "is each host reached at the interface that it uses",
    "firewall": "does each host reach each other one",
    "ports": "are the ports free that a start needs",
    "mtu": "do full packets pass",
    "rate": "does every link carry what it should, each way",
    "versions": "do all run the same Python, torch and Shoal",
    "processor": "do all processors round alike",
    "clocks": "do clocks agree",
    "files": "may processes open as many files as they need",
    "memory": "is there shared memory",
}


@dataclass(frozen=True)
class Finding:
    """Fault that a check has found.

    Args:
        check: the check that found it, one of `CHECKS`.
        what: the fault, in one sentence.
        where: the host, or the hosts.
        got: the facts that were seen.
        mend: the command that mends it.
        on: the place to run that command, if not `where`.
    """

    check: str
    what: str
    where: str
    got: str
    mend: str
    on: str = ""
