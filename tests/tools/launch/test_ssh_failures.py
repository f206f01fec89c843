"""Each way in which ssh fails has its own name and remedy, by the words of OpenSSH."""

from __future__ import annotations

import pytest

from shoal_tools.launch.ssh_failures import FAILURES, failure_of

pytestmark = pytest.mark.quick

CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Offending ED25519 key in /root/.ssh/known_hosts:3
Host key for b has changed and you have requested strict checking.
Host key verification failed.
"""
JUMP = """ssh: Could not resolve hostname jump: Name or service not known
kex_exchange_identification: Connection closed by remote host
Connection closed by UNKNOWN port 65535
"""
WORDS = {
    "/root/.ssh/config: line 2: Bad configuration option: hostnam": "understand its configuration",
    "Bad owner or permissions on /root/.ssh/config": "does not trust its configuration",
    "ssh: Could not resolve hostname b: Temporary failure in name resolution": "name is not known",
    "ssh: connect to host b port 22: Connection refused": "no ssh server listens",
    "ssh: connect to host b port 22: No route to host": "no way leads to the host",
    "ssh: connect to host b port 22: Network is unreachable": "no way leads to the host",
    "ssh: connect to host b port 22: Connection timed out": "does not answer",
    "Connection timed out during banner exchange": "does not answer",
    CHANGED: "another one than before",
    "No ED25519 host key is known for b and you have requested strict checking.\n"
    "Host key verification failed.": "not known here yet",
    "Permissions 0644 for 'key' are too open.\nLoad key \"key\": bad permissions\n"
    "me@b: Permission denied (publickey).": "a private key that others may read",
    "Received disconnect from b: 2: Too many authentication failures": "too many keys were tried",
    "me@b: Permission denied (publickey,password).": "takes no key of this user",
    "Unable to negotiate with b port 22: no matching host key type found.": "in common",
    "kex_exchange_identification: Connection closed by remote host": "before a login",
    "kex_exchange_identification: read: Connection reset by peer": "before a login",
    JUMP: "the name is not known here",
    "": "ssh failed",
    "words of a later ssh": "ssh failed",
}


@pytest.mark.parametrize("complaint", WORDS)
def test_a_complaint_has_a_name_and_a_remedy(complaint: str) -> None:
    failure, line = failure_of(f"motd of the host\n{complaint}\n" if complaint else "")
    assert WORDS[complaint] in failure.problem and failure.do
    assert line in complaint or not complaint
    assert "password" not in failure.problem or "Permission denied" in complaint


def test_each_failure_is_shown_by_a_complaint() -> None:
    assert {failure_of(words)[0] for words in WORDS} >= {*FAILURES}
