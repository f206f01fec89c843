"""Ranks by ssh on two hosts, from one place: what is checked, said and left.

The agent is a shell in place of torchrun, as that takes seconds to start. test_run_script.py has
the real one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import SshHosts, missing, ssh_hosts

from shoal.contracts.launcher import TOKEN, Job, Result
from shoal.core.errors import UsageError
from shoal_tools.launch import ssh
from shoal_tools.launch.agent import HostPlace
from shoal_tools.launch.host_end import RANK_SCRIPT
from shoal_tools.launch.ssh import Ssh, shipped_variables

pytestmark = [
    pytest.mark.lab,
    pytest.mark.processes,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# As torchrun: starts the ranks of a host, passes SIGTERM on, and fails if one of them does.
AGENT = """
trap 'kill -TERM $pids' TERM INT
for place in $(seq 0 $((SLOTS - 1))); do
  TORCHELASTIC_RESTART_COUNT=0 RANK=$((FIRST + place)) LOCAL_RANK=$place \
    setsid sh -c "$0" sh "$@" &
  pids="$pids -$!"
done
code=0
for pid in $pids; do wait ${pid#-}; last=$?; test $last = 0 || code=$last; done
exit $code
"""


def agent(*arguments: Any) -> tuple[str, ...]:
    *_, place, command = arguments
    assert isinstance(place, HostPlace)
    own = (f"SLOTS={place.slots}", f"FIRST={place.number}")
    return ("env", *own, "sh", "-c", AGENT, RANK_SCRIPT, *command)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@pytest.fixture(autouse=True)
def shells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "agent_command", agent)


def launch(hosts: SshHosts, script: str, master: str = "a,b:2", **options: Any) -> Result:
    ranks = 3 if ":" in master else 2
    job = Job(("sh", "-c", script), ranks, master=master, grace_s=1.0, **options)
    return Ssh(folder=str(hosts.folder), ssh=hosts.ssh).launch(job)


@contextmanager
def once(folder: Path, count: int, act: Callable[[], None]) -> Iterator[None]:
    """Act from beside as soon as a folder has so many files."""
    ended = threading.Event()

    def wait() -> None:
        while len(list(folder.iterdir())) < count:
            if ended.wait(0.05):
                return
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def only_servers(hosts: SshHosts) -> None:
    """Assert that nothing runs on the hosts but their ssh servers."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [pid for host in (0, 1) for pid in hosts.processes(host)]
        if len(left) == 2:
            return
        time.sleep(0.1)
    names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
    raise AssertionError(names)


def test_lines_carry_their_host_and_the_token_is_nowhere_seen(
    hosts: SshHosts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv(TOKEN, "a secret")  # which ssh would inherit
    script = """
    printf 'half '; sleep 0.1; printf '%s %s\\n' "$RANK $SHOAL_HOST" "$(hostname) $NCCL_DEBUG $X"
    echo "token $SHOAL_TOKEN" >&2; pwd; printf 'no end'
    grep -alz 'a[ ]secret' /proc/[0-9]*/cmdline 2>/dev/null || echo unseen
    for p in $(pgrep -x ssh); do tr '\\0' '\\n' </proc/$p/environ | grep -c 'a[ ]secret'
    done 2>/dev/null; true
    """
    assert launch(hosts, script, environment={"X": "y", TOKEN: "a secret"}) == Result(
        (0, 0, 0), None
    )
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines.count("[a] half 0 a h0 INFO y") == 1
    assert lines.count("[b] half 1 b h1 INFO y") == lines.count("[b] half 2 b h1 INFO y") == 1
    assert lines.count(f"[b] {hosts.folder}") == 2
    assert sorted(printed.err.splitlines()) == [
        "[a] token a secret",
        "[b] token a secret",
        "[b] token a secret",
    ]
    assert lines.count("[a] no endunseen") == 1
    assert not [line for line in lines if line.endswith("] 1")]  # an ssh with the secret
    only_servers(hosts)


def test_all_that_is_wrong_is_named_by_host_in_one_message(hosts: SshHosts) -> None:
    hosts.at(1, f"echo 1 > {hosts.folder}/other.py")
    launcher = Ssh(
        python=sys.executable, folder=str(hosts.folder), ssh=hosts.ssh, same=("other.py",)
    )
    names = "a,b,closed,nobody@a,10.77.0.1,nowhere,absent,renewed"
    with pytest.raises(UsageError) as raised:
        launcher.launch(Job((sys.executable, "x"), 8, master=names))
    said = str(raised.value)
    assert "7 of 8 hosts cannot start, and nothing was started" in said
    assert f"a: the file is not there: {hosts.folder}/other.py" in said
    for host, problem, words, do in (
        ("closed", "no ssh server listens", "Connection refused", "start sshd there, or check"),
        ("nobody@a", "takes no key of this user", "Permission denied", "ssh-copy-id nobody@a"),
        ("10.77.0.1", "its key is not known here", "verification failed", "ssh 10.77.0.1 once"),
        ("nowhere", "the name is not known here", "Could not resolve", "check the name, or give"),
        ("absent", "no way leads to the host", "No route to host", "look whether it is on"),
        ("renewed", "another one than before", "HAS CHANGED", "ssh-keygen -R renewed"),
    ):
        first, second = re.split(r"\n  (?=\S)", said.partition(f"\n  {host}: ")[2])[0].splitlines()
        assert problem in first and words in first, said
        assert f"do this: {do}" in second or f"the host was set up anew: {do}" in second, said
    with pytest.raises(UsageError, match="interpreter is not there: /no/python"):
        Ssh(python="/no/python", ssh=hosts.ssh).launch(Job(("sh",), 1, master="b"))
    with pytest.raises(UsageError, match=r"folder cannot be used: .Errno 2"):
        Ssh(folder="/no/folder", ssh=hosts.ssh).launch(Job(("sh",), 1, master="b"))
    only_servers(hosts)


@pytest.mark.slow
def test_files_that_differ_and_a_port_that_is_taken(hosts: SshHosts) -> None:
    hosts.at(0, f"echo 1 > {hosts.folder}/train.py")
    hosts.at(1, f"echo 2 > {hosts.folder}/train.py")
    far = str(hosts.folder / "train.py")
    launcher = Ssh(folder=str(hosts.folder), ssh=hosts.ssh, same=(far,), port=22)
    with pytest.raises(UsageError) as raised:
        launcher.launch(Job(("sh",), 2, master="a,b"))
    said = str(raised.value)
    assert f"b: {far} differs from the file on a" in said
    assert "a: port 22 is taken: Address already in use" in said and "--master-port" in said


@pytest.mark.slow
def test_one_machine_under_two_names_is_named_once(hosts: SshHosts) -> None:
    launcher = Ssh(folder=str(hosts.folder), ssh=hosts.ssh)
    with pytest.raises(UsageError, match="root@a: it is the same machine as a"):
        launcher.launch(Job(("sh",), 2, master="a,root@a"))


@pytest.mark.slow
def test_hosts_that_do_not_reach_the_first_one(hosts: SshHosts) -> None:
    launcher = Ssh(folder=str(hosts.folder), ssh=hosts.ssh, address="127.0.0.1")
    with pytest.raises(UsageError, match=r"b: it does not reach a at 127\.0\.0\.1 port 29500"):
        launcher.launch(Job(("sh",), 2, master="a,b"))


@pytest.mark.slow
def test_files_are_sent(hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "sent.sh").write_text("echo sent\n")
    script = "test $(cat sub/sent.sh | wc -l) = 1 && test $PWD = $FOLDER"
    folder = hosts.folder / "new"
    job = Job(
        ("sh", "-c", script),
        2,
        {"FOLDER": str(folder)},
        master="a,b",
        files=(Path("sub/sent.sh"),),
    )
    assert Ssh(folder=str(folder), ssh=hosts.ssh).launch(job).exit_code == 0


def test_the_first_failure_is_the_exit_code_and_ends_all(
    hosts: SshHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "setsid sleep 601 & test $RANK = 1 && exit 7; sleep 602"
    result = launch(hosts, script, "a,b")
    assert (result.first_failure, result.exit_code) == (1, 7)
    said = capsys.readouterr().err
    assert "shoal: rank 1 on b has ended with exit code 7" in said
    assert "shoal: sending SIGTERM to a" in said
    only_servers(hosts)


@pytest.mark.slow
def test_a_rank_that_others_blame_is_the_first_failure(hosts: SshHosts, tmp_path: Path) -> None:
    script = f"""
    test $RANK = 1 && {{ touch {tmp_path}/1; while test -e {tmp_path}/1; do :; done; exit 9; }}
    while test ! -e {tmp_path}/1; do sleep 0.02; done
    rm {tmp_path}/1
    echo 1 >$SHOAL_BLAMED
    """
    job = Job(("sh", "-c", f"{script} exit 1"), 2, master="a,b", grace_s=15.0)
    result = Ssh(folder=str(hosts.folder), ssh=hosts.ssh).launch(job)
    assert (result.exit_codes, result.first_failure) == ((1, 9), 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_ranks_on_all_hosts(
    hosts: SshHosts,
    number: signal.Signals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    script = f"setsid sleep 603 & touch {tmp_path}/$RANK; sleep 604 & wait"
    try:
        act = once(tmp_path, 3, lambda: os.kill(os.getpid(), number))
        with act, pytest.raises(KeyboardInterrupt):
            launch(hosts, script)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "ranks on a, b may save and end within 1 s" in capsys.readouterr().err
    only_servers(hosts)


def test_a_host_that_dies_ends_the_others(
    hosts: SshHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with once(tmp_path, 3, lambda: hosts.kill(1)):
        result = launch(hosts, f"setsid sleep 605 & touch {tmp_path}/$RANK; sleep 606")
    assert (result.exit_codes, result.first_failure) == ((143, 137, 137), 1)
    assert "shoal: b is lost: " in capsys.readouterr().err
    only_servers(hosts)


def test_variables_that_are_shipped() -> None:
    found = shipped_variables(
        {
            "PYTHONPATH": "x",
            "NCCL_A": "1",
            "SHOAL_HOST": "h",
            "SHOAL_TOKEN": "t",
            "SHOAL_CACHE": "off",
            "SHOAL_JOB": "j",
            "PATH": "p",
            "TORCH_LOGS": "+",
        }
    )
    assert found == {"PYTHONPATH": "x", "NCCL_A": "1", "SHOAL_CACHE": "off", "TORCH_LOGS": "+"}
