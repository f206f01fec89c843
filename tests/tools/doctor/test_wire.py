"""What passes between doctors: every wait ends, whoever is at the other side."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal_tools.doctor import wire
from shoal_tools.doctor.deadline import all_within, within
from shoal_tools.doctor.wire import ANOTHER, NO_ANSWER, NO_ROUTE, REFUSED, Door, Responder

SECRET = "secret"


@pytest.fixture
def responder() -> Iterator[Responder]:
    made = Responder((0,), SECRET, "127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def silent() -> Iterator[Door]:
    """Somebody who accepts, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Door("127.0.0.1", server.getsockname()[1])


def door(responder: Responder) -> Door:
    return Door("127.0.0.1", responder.ports[0])


def test_a_responder_is_reached_measured_and_told(responder: Responder) -> None:
    at = door(responder)
    assert wire.reach(at, responder.id) == ("", "127.0.0.1")
    assert wire.reach(at, "another")[0] == ANOTHER
    trip_s, ahead_s = wire.latency(at, SECRET)
    assert 0 < trip_s < 1 and abs(ahead_s) < 1
    for outward in (True, False):
        assert wire.largest(at, SECRET, outward, mtu=1500) is None
        assert wire.rate(at, SECRET, outward, seconds=0.1) > 1e6
    wire.put(at, SECRET, "key", "value")
    assert responder.inbox == {"key": "value"}
    responder.outbox["key"] = "answer"
    assert wire.get(at, SECRET, "key") == "answer"
    assert wire.get(at, SECRET, "nothing") == ""


def test_requests_without_the_token_are_refused(responder: Responder) -> None:
    at = door(responder)
    with pytest.raises(OSError):
        wire.put(at, "another", "key", "value")
    with pytest.raises(OSError):
        wire.latency(at, "")
    assert responder.inbox == {}


def test_every_wait_on_a_silent_port_ends(silent: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TIMEOUT_S", 0.3)
    began = time.monotonic()
    assert wire.reach(silent, "", 0.3)[0] == ANOTHER
    for ask in (
        lambda: wire.latency(silent, SECRET),
        lambda: wire.get(silent, SECRET, "key"),
        lambda: wire.put(silent, SECRET, "key", "value"),
        lambda: wire.largest(silent, SECRET, True, 1500),
        lambda: wire.largest(silent, SECRET, False, 1500),
        lambda: wire.rate(silent, SECRET, True, 0.1),
        lambda: wire.rate(silent, SECRET, False, 0.1),
    ):
        with pytest.raises(OSError):
            ask()
    assert time.monotonic() - began < 5


def test_how_connections_fail_is_told_apart(silent: Door) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = Door("127.0.0.1", server.getsockname()[1])
    assert wire.connects(closed) == REFUSED
    assert wire.connects(silent) == ""
    assert wire.connects(Door("no address", 1)) == NO_ROUTE
    assert wire.outcome(TimeoutError()) == NO_ANSWER


@pytest.mark.parametrize(
    "said", [b"\x80\x04]\x94.", b"{}\n", b"[" * 100_000 + b"\n", b"x" * 1_000_000, os.urandom(999)]
)
def test_a_strangers_bytes_end_their_own_connection_only(responder: Responder, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", responder.ports[0]), timeout=5) as stranger:
        stranger.recv(1000)
        with suppress(ConnectionError):
            stranger.sendall(said + b"\n")
            while stranger.recv(1000):
                pass
    assert wire.reach(door(responder), responder.id)[0] == ""


def test_idle_strangers_do_not_keep_others_out_for_long(
    responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = [socket.create_connection(("127.0.0.1", responder.ports[0])) for _ in range(200)]
    deadline = time.monotonic() + 8
    while wire.reach(door(responder), responder.id)[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert wire.reach(door(responder), responder.id)[0] == ""
    for each in idle:
        each.close()


def test_datagrams_are_heard(responder: Responder) -> None:
    other = Responder((0,), SECRET, "127.0.0.1")
    other.knock([door(responder)])
    deadline = time.monotonic() + 5
    while other.id not in responder.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {other.id, "127.0.0.1"} <= responder.heard
    other.close()


def test_a_call_that_blocks_is_left_behind() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, ended.wait)
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)
    works = {"blocks": ended.wait, "fails": lambda: 1 // 0, "ends": lambda: 7}
    assert all_within(0.3, works) == {"ends": 7}
    ended.set()
