"""`shoal doctor` as people run it: alone, among ranks and in a lab; its exit codes."""

from __future__ import annotations

import socket
import sys
import time

import pytest
from click.testing import CliRunner

from shoal.comm.rendezvous import variables
from shoal.contracts.launcher import Job
from shoal_tools.cli import main
from shoal_tools.doctor import meet
from shoal_tools.doctor.finding import CHECKS
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local

DOCTOR = (sys.executable, "-m", "shoal", "doctor")
needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_alone_it_looks_at_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = CliRunner().invoke(main, ["doctor", "--ignore", "ports", "--ignore", "memory"])
    assert ran.exit_code == 0, ran.output
    assert "sound: " in ran.output and "on 1 host" in ran.output
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    ran = CliRunner().invoke(main, ["doctor"])
    assert ran.exit_code == 1
    assert "interface: " in ran.output and "has no interface eth99" in ran.output


def test_verbose_says_of_every_check_how_it_came_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    ignored = ["--ignore", "ports", "--ignore", "memory", "--ignore", "files"]
    ran = CliRunner().invoke(main, ["doctor", "--verbose", *ignored])
    lines = [line for line in ran.output.splitlines() if "? " in line]
    assert [line.partition(":")[0] for line in lines] == list(CHECKS)
    outcomes = {line.partition(":")[0]: line.partition("? ")[2] for line in lines}
    assert outcomes["interface"] == "1 finding" and outcomes["start"] == "yes"
    assert outcomes["ports"] == "left out"
    assert f"{len(CHECKS) - 3} checks on 1 host" in ran.output


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_of_one_host_are_one_host(capfd: pytest.CaptureFixture[str]) -> None:
    result = Local().launch(Job((*DOCTOR, "--ignore", "ports", "--ignore", "memory"), 2))
    printed = capfd.readouterr()
    assert result.exit_codes == (0, 0), printed.err
    assert "on 1 host" in printed.out and "[rank 1]" not in printed.out


@pytest.mark.slow
@pytest.mark.lab
@needs_lab
def test_a_low_limit_of_files_is_found_in_a_lab(capfd: pytest.CaptureFixture[str]) -> None:
    command = ("sh", "-c", '[ $RANK = 0 ] || ulimit -n 256; exec "$@"', "sh", *DOCTOR)
    result = Lab(hosts=2, rate="200mbit").launch(Job(command, 2))
    printed = capfd.readouterr().out
    assert result.exit_codes == (1, 1), "on every host"
    assert printed.count("files: a process may open too few files") == 1
    assert "where: h1" in printed and "mend it: ulimit -n 65536" in printed
    assert "1 finding: " in printed and "[h1]" not in printed


def test_a_silent_stranger_at_the_meeting_place_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meet, "_STORE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        for name, value in variables("127.0.0.1", port, 1, 2, 0, 1).items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        ran = CliRunner().invoke(main, ["doctor"])
        assert time.monotonic() - began < 10
    assert ran.exit_code == 1, ran.output
    assert f"port {port}, where the ranks are to meet, belongs to another program" in ran.output
    assert f"mend it, on every host: export MASTER_PORT={port + 1}" in ran.output


def test_nobody_at_the_meeting_place_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in variables("127.0.0.1", port, 1, 2, 0, 1).items():
        monkeypatch.setenv(name, value)
    ran = CliRunner().invoke(main, ["doctor", "--wait", "0.5"])
    assert ran.exit_code == 1, ran.output
    assert f"127.0.0.1:{port}: refused; the host is there, and nobody listens" in ran.output
