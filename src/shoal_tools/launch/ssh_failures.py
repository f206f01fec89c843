"""Reads ssh's complaints, so that each failure to reach a host has its own name and remedy.

ssh ends with 255 for all of them, and says the reason in words that OpenSSH has kept for decades.
The first failure of the table whose words are there counts: a jump host that fails, for instance,
says its reason before the words about the host itself.

Guarded by tests/tools/launch/test_ssh_failures.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class SshFailure:
    """One way in which ssh fails.

    Args:
        words: a pattern of ssh's complaint.
        problem: the failure, in words.
        do: the remedy. `{login}` and `{name}` stand for the host.
    """

    words: str
    problem: str
    do: str


_CONFIG = "check HostName and Port in ~/.ssh/config"
_TRY = "ssh -o BatchMode=yes {login} true"
FAILURES = (
    SshFailure(
        "Bad configuration option|bad configuration option|keyword .* extra arguments",
        "ssh does not understand its configuration",
        "mend that line of ~/.ssh/config",
    ),
    SshFailure(
        "Bad owner or permissions on",
        "ssh does not trust its configuration, because others may write it",
        "chmod 600 ~/.ssh/config",
    ),
    SshFailure(
        "Could not resolve hostname",
        "the name is not known here",
        "check the name, or give it a HostName in ~/.ssh/config or a line in /etc/hosts",
    ),
    SshFailure(
        "Connection refused",
        "the host is there, and no ssh server listens",
        "start sshd there, or check the port in ~/.ssh/config",
    ),
    SshFailure(
        "No route to host|Network is unreachable",
        "no way leads to the host",
        f"look whether it is on, and on a network of this machine; {_CONFIG}",
    ),
    SshFailure(
        "timed out",
        "the host does not answer",
        f"look whether it is on, and whether a firewall drops what comes to ssh's port; {_CONFIG}",
    ),
    SshFailure(
        "REMOTE HOST IDENTIFICATION HAS CHANGED|host key .* has changed",
        "its key is another one than before",
        "find out why. If the host was set up anew: ssh-keygen -R {name}, then ssh {login} once",
    ),
    SshFailure(
        "Host key verification failed|host key is known",
        "its key is not known here yet",
        "ssh {login} once by hand, and accept its key",
    ),
    SshFailure(
        "UNPROTECTED PRIVATE KEY FILE|bad permissions",
        "ssh does not use a private key that others may read",
        "chmod 600 the key's file",
    ),
    SshFailure(
        "Too many authentication failures",
        "the host refused, because too many keys were tried",
        "name the right key in ~/.ssh/config: IdentityFile, and IdentitiesOnly yes",
    ),
    SshFailure(
        "Permission denied",
        "the host takes no key of this user, and Shoal gives no password",
        "ssh-copy-id {login}",
    ),
    SshFailure(
        "no matching .* found|no mutual",
        "the host and this machine have no method of ssh in common",
        f"update ssh on the older one, then try: {_TRY}",
    ),
    SshFailure(
        "Connection (closed|reset)|banner|kex_exchange_identification",
        "the host ended the connection before a login",
        f"look at sshd's log there: it may be full (MaxStartups), or deny this host. Try: {_TRY}",
    ),
)
_OTHER = SshFailure("", "ssh failed", f"make this work first: {_TRY}")


def failure_of(complaints: str) -> tuple[SshFailure, str]:
    """Return the failure that ssh complains of, and the line of the complaint that says so.

    Args:
        complaints: everything that ssh has written.

    Examples:
        >>> failure_of("ssh: connect to host a port 22: Connection refused\\n")[0].problem
        'the host is there, and no ssh server listens'
    """
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    for failure in FAILURES:
        for line in lines:
            if re.search(failure.words, line):
                return failure, line.strip("@ ")
    return _OTHER, lines[-1] if lines else "it says nothing"
