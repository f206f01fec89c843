"""The loop under every launcher: output, grace, and the ends that a launcher itself can meet."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.launch import processes
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local
from shoal_tools.launch.namespaces import NAMES, SETTINGS
from shoal_tools.launch.processes import Command, Interrupts

LAUNCHER = """
import signal, sys
from shoal.contracts.launcher import Job
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local

# Whoever started the tests may have ignored it.
signal.signal(signal.SIGINT, signal.default_int_handler)
launcher = Lab(hosts=2) if sys.argv[1] == "lab" else Local()
launcher.launch(Job(("sh", "-c", 'echo $$ >"$0/$RANK"; exec sleep 600', sys.argv[2]), ranks=2))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["local", pytest.param("lab", marks=pytest.mark.lab)])
def launching(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A launcher in a process of its own, and the process ids of its two ranks, which sleep."""
    if request.param == "lab" and (reason := Lab().missing()):
        pytest.skip(reason)
    command = (sys.executable, "-c", LAUNCHER, request.param, str(tmp_path))
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as launcher:
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert launcher.poll() is None
            time.sleep(0.02)
        yield launcher, [int(file.read_text()) for file in files]
        launcher.kill()


def gone(pids: list[int], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(Path("/proc", str(pid)).exists() for pid in pids)


def namespaces_of(pid: int) -> list[str]:
    return [path.name for place in (NAMES, SETTINGS) for path in place.glob(f"shoal-{pid}-*")]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_leaves_nothing(
    launching: tuple[subprocess.Popen[bytes], list[int]], number: signal.Signals
) -> None:
    launcher, ranks = launching
    os.killpg(launcher.pid, number)  # as a terminal does: to the whole group
    assert launcher.wait(timeout=20) == -number
    assert gone(ranks, within_s=0)
    assert namespaces_of(launcher.pid) == []


SAVES = """
trap 'sleep 0.5; echo saved; exit 0' INT TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.mark.processes
def test_ranks_have_a_stated_time_to_save_after_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "KILL_AFTER_S", 0.1)
    interrupts = Interrupts()
    commands = [Command(("sh", "-c", SAVES), os.environ, f"rank {rank}") for rank in range(2)]
    timer = threading.Timer(1.0, interrupts.received.append, (signal.SIGINT,))
    timer.start()
    result = processes.run(commands, 20.0, interrupts)
    printed = capfd.readouterr()
    assert result.exit_codes == (0, 0)
    assert printed.out.count("saved") == 2
    assert "SIGINT: rank 0, rank 1 may save and end within 20 s; Ctrl-C again" in printed.err


@pytest.mark.processes
@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_that_does_not_end_is_ended_after_that_time_or_at_the_second_ctrl_c(
    times: int,
) -> None:
    interrupts = Interrupts()
    deaf = Command(("sh", "-c", "trap '' INT; while :; do sleep 0.05; done"), os.environ, "rank 0")
    for number in range(times):
        threading.Timer(0.5 + number, interrupts.received.append, (signal.SIGINT,)).start()
    began = time.monotonic()
    result = processes.run([deaf], 1.0 if times == 1 else 600.0, interrupts)
    assert result.exit_codes == (137,)
    assert time.monotonic() - began < 20


@pytest.mark.processes
def test_ranks_die_with_a_killed_launcher_and_the_next_lab_sweeps(
    launching: tuple[subprocess.Popen[bytes], list[int]], request: pytest.FixtureRequest
) -> None:
    launcher, ranks = launching
    launcher.kill()
    launcher.wait(timeout=20)
    assert gone(ranks, within_s=5)
    if namespaces_of(launcher.pid):  # those of the lab, which nobody was left to take down
        with Lab(hosts=1):
            assert namespaces_of(launcher.pid) == []


@pytest.mark.processes
def test_the_others_get_their_grace_then_sigterm_then_sigkill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "KILL_AFTER_S", 0.5)
    script = (
        "case $RANK in"
        "  0) exit 7;;"
        "  1) sleep 0.1; echo peer lost; exit 5;;"  # ends within the grace, and says why
        "  2) exec sleep 600;;"
        "  3) trap '' TERM; while :; do sleep 0.1; done;;"
        "esac"
    )
    result = Local().launch(Job(("sh", "-c", script), 4, grace_s=0.5))
    assert (result.exit_codes, result.first_failure, result.exit_code) == ((7, 5, 143, 137), 0, 7)
    printed = capfd.readouterr()
    assert "[rank 1] peer lost\n" in printed.out
    assert "rank 0 ended first (exit code 7)" in printed.err


@pytest.mark.processes
def test_a_rank_that_is_stopped_gets_no_grace_once_it_alone_is_left() -> None:
    began = time.monotonic()
    stops = 'if [ "$RANK" = 1 ]; then kill -STOP $$; fi; sleep 0.3; exit 3'
    result = Local().launch(Job(("sh", "-c", stops), ranks=2, grace_s=60.0))
    assert result.exit_codes == (3, 137)
    assert result.first_failure == 0
    assert time.monotonic() - began < 20


@pytest.mark.processes
def test_what_the_ranks_agreed_on_goes_before_who_ended_first(
    capfd: pytest.CaptureFixture[str],
) -> None:
    commands = [
        Command(("sh", "-c", script), os.environ, f"rank {rank}")
        for rank, script in enumerate(("exit 5", "exit 7"))
    ]
    with Interrupts() as interrupts:
        result = processes.run(
            commands, 5.0, interrupts, lambda job: ("rank 1 failed: a bad sample", 1)
        )
        assert (result.first_failure, result.exit_code) == (1, 7)
        assert capfd.readouterr().err.splitlines()[-1] == "shoal: rank 1 failed: a bad sample"
        calm = processes.run(commands[:1], 5.0, interrupts, lambda job: ("rank 1 has left", None))
        assert (calm.first_failure, calm.exit_code) == (0, 5)


@pytest.mark.processes
def test_lines_carry_their_rank_and_one_rank_carries_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    script = "echo out $RANK; echo err $RANK >&2; printf unended"
    Local().launch(Job(("sh", "-c", script), 2))
    printed = capfd.readouterr()
    expected = ["[rank 0] out 0", "[rank 0] unended", "[rank 1] out 1", "[rank 1] unended"]
    assert sorted(printed.out.splitlines()) == expected
    assert sorted(printed.err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]
    Local().launch(Job(("sh", "-c", script), 1))
    assert capfd.readouterr() == ("out 0\nunended", "err 0\n")


@pytest.mark.processes
def test_lines_pass_while_ranks_run(tmp_path: Path) -> None:
    """Rank 1 ends only when rank 0's line has come through; Python as the rank, whose output is a
    pipe.
    """
    seen = tmp_path / "seen"
    script = "import os, pathlib, time\nprint('now')\n"
    script += f"while not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.02)"

    class Sink(io.StringIO):
        def write(self, text: str) -> int:
            seen.touch()
            return super().write(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", sink := Sink())
        result = Local().launch(Job((sys.executable, "-c", script), 2))
    assert result.exit_code == 0
    assert sorted(sink.getvalue().splitlines()) == ["[rank 0] now", "[rank 1] now"]


@pytest.mark.processes
def test_it_launches_off_the_main_thread_and_leaves_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(Local().launch(Job(("false",), 2)).exit_code)
    )
    thread.start()
    Local().launch(Job(("true",), 2))
    thread.join()
    assert codes == [1]
    assert [
        signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ] == before


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_progress_bar_shows_as_on_a_terminal(size: int) -> None:
    written = b"start\r\n\r 10%\r 50%\r100%\nend \xc3\xa9\n\rlast"
    file, terminal = io.StringIO(), Terminal()
    for sink in (file, terminal):
        lines = processes.Lines("[h0] ", sink)
        for at in range(0, len(written), size):
            lines.feed(written[at : at + size])
        lines.end()
    assert file.getvalue() == "[h0] start\n[h0] 100%\n[h0] end é\n[h0] last\n"
    assert terminal.getvalue().replace("\x1b[K", "") == (
        "[h0] start\n[h0]  10%\r[h0]  50%\r[h0] 100%\n[h0] end é\n[h0] last\n"
    )
