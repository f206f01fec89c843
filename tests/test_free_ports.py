"""No test meets at a port of its own choice: another test, or a program, may have it.

In a lab's network namespaces every port is free.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from free_ports import free_port

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parent
FIXED = re.compile(r"(?i)(master[-_]port|rdzv[-_]endpoint)[^\n]{0,25}\b[1-9][0-9]{3,4}\b")
IN_A_NAMESPACE = {"faults/test_restarts.py", "tools/launch/test_networks.py"}
# words and variables that are read, and no place where ranks meet
ONLY_READ = {
    "comm/test_other_launchers.py",
    "comm/test_rendezvous.py",
    "tools/doctor/test_faults.py",
    "tools/launch/test_agent.py",
    "test_free_ports.py",
}


def test_ranks_meet_at_free_ports() -> None:
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if FIXED.search(path.read_text())
    }
    assert found - IN_A_NAMESPACE - ONLY_READ == set()
    assert FIXED.search('"--master-port", "29561"') and FIXED.search('MASTER_PORT": "29713"')


def test_two_free_ports_differ() -> None:
    assert len({free_port() for _ in range(20)}) > 1
