"""Hosts as people write them, in a list and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.errors import UsageError
from shoal_tools.launch.host_list import SshHost, filled, hosts_in, hosts_in_file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 1)]),
        ("a,b,c", [("a", 1), ("b", 1), ("c", 1)]),
        (" a , b:2,", [("a", 1), ("b", 2)]),
        ("me@a:4", [("me@a", 4)]),
        ("10.0.0.1:2,[fe80::1%eth0]:3", [("10.0.0.1", 2), ("fe80::1%eth0", 3)]),
        ("a,b,a:2", [("a", 3), ("b", 1)]),
        ("a,me@a", [("a", 1), ("me@a", 1)]),
    ],
)
def test_a_list(text: str, expected: list[tuple[str, int]]) -> None:
    found = hosts_in(text)
    assert [(host.login, host.slots) for host in found] == expected
    assert hosts_in(",".join(host.word for host in found)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host is named"),
        (",", "no host is named"),
        ("a b", "'a b' is no host"),
        ("-oProxyCommand=true", "is no host"),
        ("me@-x", "is no host"),
        ("a:0", "slots"),
        ("a:-1", "is no host"),
        ("a:99999999", "from 1 to"),
        ("a:two", "is no host"),
        ("a;rm", "is no host"),
        ("fe80::1", "brackets"),
    ],
)
def test_a_list_with_a_mistake(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hosts_in(text)


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\n\na slots=2 max_slots=4  # fast\nme@b:3\nc\na\n  10.0.0.4   slots=1\n")
    found = [(host.login, host.slots) for host in hosts_in_file(file)]
    assert found == [("a", 3), ("me@b", 3), ("c", 1), ("10.0.0.4", 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots=none\n", "line 2"),
        ("a slot=2\n", "'slot=2'"),
        ("a 2\n", "says nothing: '2'"),
        ("# none\n", "no host is named"),
        ("a\n-x\n", "'-x' is no host"),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        hosts_in_file(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        hosts_in_file(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        hosts_in_file(tmp_path / "binary")


def test_first_hosts_fill_first() -> None:
    hosts = hosts_in("a:2,b:2,c")
    assert [(host.name, host.slots) for host in filled(hosts, 3)] == [("a", 2), ("b", 1)]
    with pytest.raises(UsageError, match="5 slots, 6 ranks"):
        filled(hosts, 6)


def test_this_machine_needs_no_ssh() -> None:
    assert SshHost("localhost").is_here and SshHost("::1").is_loopback
    assert not SshHost("localhost", user="me").is_here
