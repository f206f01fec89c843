"""`shoal run --nnodes MIN:MAX`: hosts that are started from one place, lost, and called again.

A shell stands in for ssh, and an agent without ranks for `shoal agent`, so nothing takes long.
The real ones are in test_one_command.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.elastic import members, ssh_crews
from shoal_tools.elastic.ssh_crews import SshCrews
from shoal_tools.launch import host_checks
from shoal_tools.launch.agent import HostCount
from shoal_tools.launch.host_checks import HostsCannotStart
from shoal_tools.launch.host_end import marked
from shoal_tools.launch.ssh import Ssh

pytestmark = [pytest.mark.quick, pytest.mark.processes]

# A host whose file HOST-away is there is not reached.
SSH = """
for word in "$@"; do
  test "$word" = -G && { echo hostname 127.0.0.1; exit; }
done
while test "$1" != --; do shift; done
test -e "$0-$2-away" && { echo "no route to $2" >&2; exit 255; }
shift 2
exec sh -c "$*"
"""
_TOLD = "is told to leave"
AGENT = Path(__file__).with_name("speaking_agent.py")


@pytest.fixture(autouse=True)
def one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(python: str, *arguments: Any) -> tuple[str, ...]:
        words = 'exec "$@" >"$SHOAL_END/0.out" 2>"$SHOAL_END/0.err"'
        return ("sh", "-c", words, "sh", python, str(AGENT), str(tmp_path))

    monkeypatch.setattr(ssh_crews, "elastic_agent_command", command)
    monkeypatch.setattr(host_checks, "_judge_alike", lambda *facts: None)
    monkeypatch.setattr(ssh_crews, "AGAIN_S", 2.0)
    monkeypatch.setattr(members, "FIRST_SETTLE_S", 0.5)


def launched(folder: Path, lost_after_s: float = 20.0) -> int:
    program = folder / "ssh"
    program.write_text(SSH)
    launcher = Ssh(folder=str(folder), ssh=("sh", str(program)))
    job = Job((sys.executable, "x"), 2, {"FOLDER": str(folder)}, grace_s=5.0, master="a,b")
    crews = SshCrews(launcher, HostCount(1, 2), wait_s=20.0, lost_after_s=lost_after_s)
    try:
        return crews.launch(job)
    finally:
        assert marked(f"FOLDER={folder}") == []


def beside(folder: Path, act: Callable[[Callable[[str], int]], None]) -> threading.Thread:
    """Act on a thread, which is given a way to wait for an agent's file; return it, started."""

    def there(name: str) -> int:
        until_s = time.monotonic() + 40
        while not (folder / name).exists() or not (folder / name).read_text():
            if time.monotonic() > until_s:
                (folder / "end").touch()
                raise AssertionError(name)
            time.sleep(0.02)
        return int((folder / name).read_text())

    thread = threading.Thread(target=act, args=(there,), daemon=True)
    thread.start()
    return thread


def test_a_host_that_is_lost_is_called_again_and_taken_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(there: Callable[[str], int]) -> None:
        os.kill(there("b-1"), signal.SIGKILL)
        there("a-2")
        there("b-3")
        (tmp_path / "end").touch()

    acting = beside(tmp_path, act)
    assert launched(tmp_path) == 0
    acting.join()
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    told = [sorted(line.partition(": ")[2].split(", ")) for line in lines if line[:3] == "[a]"]
    assert told == [["a", "b"], ["a"], ["a", "b"]]
    assert "shoal: host b is lost: its agent has ended" in printed.err
    assert "shoal: b is reached again" in printed.err


def test_a_host_that_cannot_be_reached_is_left_out_until_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ssh-b-away").touch()

    def act(there: Callable[[str], int]) -> None:
        there("a-1")
        time.sleep(2.5)  # a call in vain
        (tmp_path / "ssh-b-away").unlink()
        there("b-2")
        (tmp_path / "end").touch()

    acting = beside(tmp_path, act)
    assert launched(tmp_path) == 0
    acting.join()
    said = capsys.readouterr().err
    assert "1 of 2 hosts cannot start" in said
    assert said.count("b does not start: b: ssh failed: no route to b") == 1


def test_a_host_that_was_silent_for_too_long_comes_as_a_new_one(tmp_path: Path) -> None:
    def act(there: Callable[[str], int]) -> None:
        pid = there("b-1")
        os.kill(pid, signal.SIGSTOP)
        there("a-2")
        os.kill(pid, signal.SIGCONT)
        assert there("b-3") == pid
        (tmp_path / "end").touch()

    acting = beside(tmp_path, act)
    assert launched(tmp_path, lost_after_s=3.0) == 0
    acting.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_has_all_hosts_leave_and_none_begins_anew(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(there: Callable[[str], int]) -> None:
        there("a-1"), there("b-1")
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    acting = beside(tmp_path, act)
    try:
        with pytest.raises(KeyboardInterrupt):
            launched(tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    acting.join()
    lines = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(lines) == [f"[{host}] {said}" for host in "ab" for said in ("crew 1", _TOLD)]


def test_agents_that_cannot_start_end_the_job_with_their_code(tmp_path: Path) -> None:
    for host in ("a", "b"):
        (tmp_path / f"{host}-cannot").touch()
    assert launched(tmp_path) == 3


def test_too_few_hosts_are_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    for host in ("a", "b"):
        (tmp_path / f"ssh-{host}-away").touch()
    said = "2 of 2 hosts cannot start, and nothing was started"
    with pytest.raises(HostsCannotStart, match=said) as refused:
        launched(tmp_path)
    assert [host.login for host in refused.value.hosts] == ["a", "b"]
    assert all("no route" in host.problems[0][0] for host in refused.value.hosts)
    assert f"{said}\n  {refused.value.list_of_hosts}" == str(refused.value)
