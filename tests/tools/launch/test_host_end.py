"""The far end of a connection: whatever ends it, nothing is left on the host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.elastic import ranks
from shoal_tools.launch import processes
from shoal_tools.launch.connection import Connection, gathered, wait
from shoal_tools.launch.host_end import job_folder, marked
from shoal_tools.launch.host_list import SshHost
from shoal_tools.launch.processes import Interrupts

pytestmark = [pytest.mark.quick, pytest.mark.processes]

AGENT = """
setsid sleep 607 &
touch "$FOLDER/started"
exec sleep 608
"""


@pytest.fixture
def host() -> Iterator[Connection]:
    connection = Connection(SshHost("localhost"), (), sys.executable)
    yield connection
    connection.close_input()
    connection.end(20.0)


def start(host: Connection, folder: Path, **options: Any) -> None:
    order = {
        "command": ["sh", "-c", AGENT],
        "environment": {"FOLDER": str(folder), "SHOAL_JOB": folder.name},
        "grace_s": 0.2,
        "silent_s": 60.0,
        "slots": 1,
    }
    host.order(start={**order, **options})
    deadline = time.monotonic() + 30
    while not (folder / "started").exists() and time.monotonic() < deadline:
        wait([host], 0.02)
    assert marked(f"FOLDER={folder}")


def ended(host: Connection, folder: Path) -> None:
    deadline = time.monotonic() + 30
    while host.is_open and time.monotonic() < deadline:
        wait([host], 0.05)
    assert not host.is_open and marked(f"FOLDER={folder}") == []


def test_a_launcher_that_is_gone_ends_all(host: Connection, tmp_path: Path) -> None:
    start(host, tmp_path)
    host.close_input()
    ended(host, tmp_path)


def test_a_launcher_that_is_silent_ends_all(host: Connection, tmp_path: Path) -> None:
    start(host, tmp_path, silent_s=1.0)
    ended(host, tmp_path)


def test_a_launcher_that_reads_nothing_is_gone(host: Connection, tmp_path: Path) -> None:
    script = 'exec >"$SHOAL_END/0.out"; touch $FOLDER/started; exec yes'
    start(host, tmp_path, command=["sh", "-c", script], silent_s=1.0)
    deadline = time.monotonic() + 30
    while marked(f"FOLDER={tmp_path}") and time.monotonic() < deadline:
        host.order(beat=1)  # it is not silent
        time.sleep(0.1)
    ended(host, tmp_path)


def test_leftovers_of_an_earlier_connection_end(host: Connection, tmp_path: Path) -> None:
    left = subprocess.Popen(("sleep", "610"), env={**os.environ, "LEFT": str(tmp_path)})
    start(host, tmp_path, replaces=f"LEFT={tmp_path}")
    assert left.wait(10) == -signal.SIGKILL


def test_an_agent_that_does_not_obey_is_killed(host: Connection, tmp_path: Path) -> None:
    start(host, tmp_path, command=["sh", "-c", f"trap '' TERM\n{AGENT}"])
    host.order(signal=int(signal.SIGTERM))
    ended(host, tmp_path)
    assert host.taken("ended") == {"ended": 137, "lines": ""}


def test_a_far_end_that_is_killed_takes_its_agent_along(host: Connection, tmp_path: Path) -> None:
    start(host, tmp_path, command=["sh", "-c", "touch $FOLDER/started; exec sleep 609"])
    host.process.kill()
    deadline = time.monotonic() + 30
    while marked(f"FOLDER={tmp_path}") and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel ends the agent behind the far end
    ended(host, tmp_path)


def test_folders_of_far_ends_that_were_killed_go_at_the_next_start(
    host: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "temporary"
    top.mkdir()
    monkeypatch.setenv("TMPDIR", str(top))
    killed = Connection(SshHost("localhost"), (), sys.executable)
    start(killed, tmp_path)
    killed.process.kill()
    killed.close_input()
    killed.end(20.0)
    (left,) = top.iterdir()
    assert list(left.iterdir())
    young, stranger = top / "shoal-job-young", top / "other"
    with job_folder(str(top)) as used:
        for folder in (young, stranger):
            folder.mkdir()
        for folder in (left, used, stranger):
            os.utime(folder, (0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: -1)
            with job_folder(str(top)):
                assert left.exists(), "another user's"
        with job_folder(str(top)) as another:
            assert {*top.iterdir()} == {used, young, stranger, another}
    assert {*top.iterdir()} == {young, stranger}


def test_lines_that_come_in_pieces_and_bars_that_move(host: Connection, tmp_path: Path) -> None:
    script = r"""
    touch $FOLDER/started; exec >"$SHOAL_END/0.out" 2>"$SHOAL_END/0.err"
    printf 'one '; printf 'two\nthr'; sleep 0.3; printf 'ee\n50 %%\r'; sleep 0.3
    printf '100 %%\r\n'; echo wrong >&2; printf 'no end'; sleep 0.3
    """
    start(host, tmp_path, command=["sh", "-c", script])
    ended(host, tmp_path)
    frames = host.take_lines()
    assert [data for kind, data in frames if kind == b"e"] == [b"wrong\n"]
    lines = [data for kind, data in frames if kind == b"o"]
    assert b"".join(lines) == b"one two\nthree\n50 %\r100 %\r\nno end\n"
    assert all(data[-1:] in b"\n\r" for data in lines)


@pytest.mark.parametrize("own", ["", "INFO"])
def test_ranks_write_no_frames_of_c_unless_asked(
    own: str, host: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'touch $FOLDER/started; echo $TORCH_CPP_LOG_LEVEL >"$SHOAL_END/0.out"; sleep 0.3'
    variables = {"FOLDER": str(tmp_path), **({"TORCH_CPP_LOG_LEVEL": own} if own else {})}
    start(host, tmp_path, command=["sh", "-c", script], environment=variables)
    ended(host, tmp_path)
    assert host.take_lines() == [(b"o", f"{own or 'ERROR'}\n".encode())]
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", own) if own else None
    for polite in (processes.environment(Job(("true",), 2)), ranks._polite(2)):
        assert polite["TORCH_CPP_LOG_LEVEL"] == (own or "ERROR")


def test_a_host_tells_what_it_has(host: Connection, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    look = {
        "chdir": str(tmp_path),
        "path": [],
        "files": ["there", "not-there"],
        "modules": ["json", "not_there", "json.not_there"],
        "program": "no-such-program",
        "send": {},
        "listen": [0, "proof"],
    }
    host.order(look=look)
    with Interrupts() as interrupts:
        (facts,) = gathered([host], "facts", 30, interrupts).values()
        assert facts["torch"] and facts["shoal"] and not facts["lacks"]
        assert [bool(text) for text in facts["files"].values()] == [True, False]
        assert list(facts["modules"].values()) == [True, False, False]
        assert facts["program"] == ""
        for proof, answer in (("proof", "by"), ("other", "problem")):
            host.order(reach=["127.0.0.1", facts["port"], proof])
            (reached,) = gathered([host], "reached", 30, interrupts).values()
            assert list(reached) == [answer]


def test_the_port_that_was_tried_is_free_for_the_agent(host: Connection, tmp_path: Path) -> None:
    nothing = {"path": [], "files": [], "modules": [], "program": "sh", "send": {}}
    host.order(look={"chdir": str(tmp_path), **nothing, "listen": [0, "proof"]})
    with Interrupts() as interrupts:
        (facts,) = gathered([host], "facts", 30, interrupts).values()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", facts["port"]))
    start(host, tmp_path)
    socket.create_server(("", facts["port"])).close()
