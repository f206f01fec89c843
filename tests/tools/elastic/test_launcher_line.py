"""The line between an agent and the launcher that has started it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UsageError
from shoal_tools.elastic.launcher_line import LauncherLine
from shoal_tools.elastic.messages import CrewTerms, Halt, Hello, Leave, Sign, from_agent, write
from shoal_tools.elastic.uplink import Uplink

pytestmark = pytest.mark.quick
HELLO = Hello("1", "a", 1, "", "", 5, CrewTerms())


@dataclass
class Both:
    """Both sides of a line."""

    launcher: socket.socket
    uplink: Uplink
    said: list[str]

    def until(self, count: int) -> list[Any]:
        """Wait for messages of the launcher."""
        found: list[Any] = []
        until_s = time.monotonic() + 20
        while len(found) < count and time.monotonic() < until_s:
            found += self.uplink.heard()
            time.sleep(0.01)
        return found

    def from_agent(self) -> Any:
        """Return the next message of the agent that is no sign of life."""
        while True:
            self.uplink.heard()  # an agent says hello when it looks for news
            try:
                message = from_agent(self.reading.readline())
            except TimeoutError:
                continue
            if not isinstance(message, Sign):
                return message

    def __post_init__(self) -> None:
        self.launcher.settimeout(20.0)
        self.reading = self.launcher.makefile("rb")


@pytest.fixture
def both() -> Iterator[Both]:
    launcher, own = socket.socketpair()
    said: list[str] = []
    line = LauncherLine(own.detach())
    uplink = Uplink("standard input", line.call, lambda own, other: HELLO, said.append)
    uplink.open()
    yield Both(launcher, uplink, said)
    uplink.close()
    launcher.shutdown(socket.SHUT_RDWR)
    launcher.close()
    while line._socket.fileno() >= 0:  # the thread that reads closes it
        time.sleep(0.01)


def wait_for_hello(both: Both) -> None:
    while both.uplink.away_s is not None:
        both.uplink.heard()
        time.sleep(0.01)
    assert both.from_agent() == HELLO


def test_messages_cross_both_ways(both: Both) -> None:
    wait_for_hello(both)
    both.launcher.sendall(write(Halt(1, "why")) + b"\n" + write(Sign()) + b"\n")
    assert both.until(1) == [Halt(1, "why")]
    both.uplink.send(Leave())
    assert both.from_agent() == Leave()


def test_an_empty_line_asks_for_another_hello(both: Both) -> None:
    wait_for_hello(both)
    both.launcher.sendall(b"\n" + write(Halt(2, "old")) + b"\n")
    assert both.until(1) == [Halt(2, "old")]
    assert both.from_agent() == HELLO
    assert both.said == []


def test_a_launcher_that_is_gone_is_said_once(both: Both) -> None:
    wait_for_hello(both)
    both.launcher.shutdown(socket.SHUT_RDWR)
    until_s = time.monotonic() + 20
    while both.uplink.away_s is None and time.monotonic() < until_s:
        both.uplink.heard()
        time.sleep(0.01)
    time.sleep(0.7)
    both.uplink.heard()
    assert len(both.said) == 1 and "does not answer" in both.said[0]


def test_an_input_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(UsageError, match="HOST:PORT"):
        LauncherLine(os.dup(file.fileno()))
