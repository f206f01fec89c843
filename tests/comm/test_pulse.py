"""A rank's pulse tells that it lives while it cannot beat, and is nothing to strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.comm.pulse import PulseAddress, Pulses

# a rank without PyTorch: it starts a pulse, prints the port, and does what is asked
RANK = """
import ctypes, sys, time
from shoal.comm.pulse import Pulse
pulse = Pulse("127.0.0.1", "secret")
print(pulse.port, flush=True)
if sys.argv[1] == "keeps the lock":
    ctypes.PyDLL(None).sleep(60)
time.sleep(60)
"""


def started(what: str) -> tuple[subprocess.Popen[str], Pulses]:
    rank = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RANK), what], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    pulses = Pulses(token="secret")
    pulses.addresses[1] = PulseAddress("127.0.0.1", int(rank.stdout.readline()))
    rank.stdout.close()
    return rank, pulses


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[str], Pulses]]:
    rank, pulses = started("sleeps")
    yield rank, pulses
    rank.kill()
    rank.wait()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.processes
def test_a_rank_that_keeps_the_interpreters_lock_lives() -> None:
    rank, pulses = started("keeps the lock")
    time.sleep(0.5)
    assert pulses.lives(1)
    rank.kill()
    rank.wait()


@pytest.mark.processes
def test_a_stopped_rank_is_told_from_one_that_goes_on(
    sleeper: tuple[subprocess.Popen[str], Pulses],
) -> None:
    rank, pulses = sleeper
    assert pulses.state(1) == b"S"
    os.kill(rank.pid, signal.SIGSTOP)
    time.sleep(0.1)
    assert pulses.state(1) == b"T"
    assert not pulses.lives(1)
    os.kill(rank.pid, signal.SIGCONT)
    time.sleep(0.1)
    assert pulses.lives(1)


@pytest.mark.processes
def test_it_ends_with_the_rank_however_that_ends(
    sleeper: tuple[subprocess.Popen[str], Pulses],
) -> None:
    rank, pulses = sleeper
    (child,) = children(rank.pid)
    assert not pulses.has_ended(1)
    rank.kill()
    rank.wait()
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()
    assert pulses.state(1) == b""
    assert pulses.has_ended(1)


@pytest.mark.processes
def test_strangers_get_nothing_and_keep_nobody_waiting(
    sleeper: tuple[subprocess.Popen[str], Pulses],
) -> None:
    _, pulses = sleeper
    address = pulses.addresses[1]
    silent = [socket.create_connection((address.host, address.port)) for _ in range(200)]
    for stranger in silent[:50]:
        stranger.sendall(b"\x80\x04garbage")
    assert pulses.lives(1)
    others = Pulses(token="another")
    others.addresses[1] = address
    assert others.state(1) == b""  # what it says is not for them
    for stranger in silent:
        stranger.close()


def test_without_a_pulse_nobody_answers() -> None:
    assert not Pulses().lives(1)
    assert not Pulses().has_ended(1)


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, OSError(113, "no route")])
def test_a_host_that_is_away_is_no_end_of_a_process(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise error

    pulses = Pulses()
    pulses.addresses[1] = PulseAddress("127.0.0.1", 1)
    assert pulses.has_ended(1)  # nobody listens there
    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert not pulses.has_ended(1)
