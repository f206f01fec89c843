"""Callers without a proof are bounded in number and time, and end nothing."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from shoal_tools.launch.entrance import Entrance

pytestmark = pytest.mark.quick
MOST, SHORT_S, LONG_S = 4, 0.3, 60.0


class Listener:
    """A listener whose first accepts fail."""

    def __init__(self, listener: socket.socket, *failures: int) -> None:
        self._listener, self._failures = listener, list(failures)

    def accept(self) -> Any:
        if self._failures:
            number = self._failures.pop(0)
            raise OSError(number, errno.errorcode[number])
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


class Host:
    """An entrance at a port, which admits whoever sends a byte, and sends it back."""

    def __init__(self, most_s: float, *failures: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        at: Any = Listener(listener, *failures)
        self.entrance = Entrance([at], self._serve, MOST, most_s, "test entrance")
        self.entrance.open()

    def _serve(self, caller: socket.socket) -> None:
        with suppress(OSError):
            if (said := caller.recv(1)) and self.entrance.admit(caller):
                while said:
                    caller.sendall(said)
                    said = caller.recv(1)

    def call(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(LONG_S)
    yield made
    made.entrance.close()


def answers(caller: socket.socket) -> bool:
    with suppress(OSError):
        caller.sendall(b"?")
        return caller.recv(1) == b"?"
    return False


def until(is_so: Any) -> bool:
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(is_so())


def test_the_oldest_without_a_proof_is_put_out_and_who_has_proved_himself_stays(
    host: Host,
) -> None:
    with ExitStack() as stack:
        admitted = stack.enter_context(host.call())
        assert answers(admitted)
        silent = [stack.enter_context(host.call()) for _ in range(MOST + 2)]
        assert [caller.recv(1) for caller in silent[:2]] == [b"", b""], "they are put out"
        assert until(lambda: host.entrance.waiting == MOST)
        assert answers(admitted) and answers(silent[-1])


def test_who_takes_too_long_is_put_out() -> None:
    host = Host(SHORT_S)
    began = time.monotonic()
    with host.call() as slow:
        assert slow.recv(1) == b""
        assert time.monotonic() - began > 0.9 * SHORT_S
    assert until(lambda: host.entrance.waiting == 0)
    host.entrance.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])
def test_an_accept_that_fails_is_not_the_last_one(number: int) -> None:
    host = Host(LONG_S, number, number)
    with host.call() as caller:
        assert answers(caller)
    host.entrance.close()


def test_after_its_end_nobody_is_let_in(host: Host) -> None:
    silent = host.call()
    assert until(lambda: host.entrance.waiting == 1)
    host.entrance.close()
    assert silent.recv(1) == b""
    with pytest.raises(OSError):
        host.call()
    silent.close()
