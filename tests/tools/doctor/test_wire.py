"""What passes between doctors: every wait ends, whoever is at the other side."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from shoal_tools.doctor import wire
from shoal_tools.doctor.deadline import all_within, within
from shoal_tools.doctor.line import UnprovedError, datagram
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


def test_strangers_who_say_nothing_keep_nobody_out(
    responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_REQUEST_S", 60.0)
    responder.outbox["key"] = "answer"
    over, held = threading.Event(), list[socket.socket]()

    def stranger() -> None:
        while not over.wait(0.002):
            held.append(socket.create_connection(("127.0.0.1", responder.ports[0])))

    thread = threading.Thread(target=stranger)
    thread.start()
    while len(held) < 200:
        time.sleep(0.01)
    at = door(responder)
    outcomes = [(wire.reach(at, responder.id)[0], wire.get(at, SECRET, "key")) for _ in range(10)]
    over.set()
    thread.join()
    assert outcomes == [("", "answer")] * 10
    names = [each.name for each in threading.enumerate()]
    assert names.count("shoal-doctor-responder") < 150, "of 200 strangers"
    for each in held:
        each.close()


class Stranger:
    """Somebody without the token at a doctor's port, who says an id and takes every request."""

    def __init__(self, id: str) -> None:
        self._greeting = msgspec.json.encode({"id": id, "number": "7"}) + b"\n"
        self._server = socket.create_server(("127.0.0.1", 0))
        self.door = Door("127.0.0.1", self._server.getsockname()[1])
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                with self._server.accept()[0] as caller, suppress(OSError):
                    caller.sendall(self._greeting)
                    caller.recv(10_000)
                    # what a doctor would say, behind a signature of the right length
                    caller.sendall(b"0" * 64 + b'"proved"\n')
                    caller.sendall(b"0" * 64 + b'"a sound host"\n' + bytes(1 << 16))
                    while caller.recv(10_000):
                        pass

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def test_a_stranger_who_answers_is_not_taken_for_a_doctor() -> None:
    stranger = Stranger("the id of a sound host")
    at = stranger.door
    assert wire.reach(at, "the id of a sound host", secret=SECRET)[0] == wire.UNPROVED
    for ask in (
        lambda: wire.get(at, SECRET, "host"),
        lambda: wire.put(at, SECRET, "key", "value"),
        lambda: wire.latency(at, SECRET),
        lambda: wire.largest(at, SECRET, True, 1500),
        lambda: wire.largest(at, SECRET, False, 1500),
        lambda: wire.rate(at, SECRET, True, 0.1),
        lambda: wire.rate(at, SECRET, False, 0.1),
    ):
        with pytest.raises(UnprovedError):
            ask()
    stranger.close()


def test_a_doctor_with_another_token_is_told_from_one_that_is_away(responder: Responder) -> None:
    assert wire.reach(door(responder), responder.id, secret=SECRET)[0] == ""
    assert wire.reach(door(responder), responder.id, secret="another")[0] == wire.UNPROVED
    with pytest.raises(UnprovedError):
        wire.get(door(responder), "another", "key")


def test_datagrams_are_heard(responder: Responder) -> None:
    other = Responder((0,), SECRET, "127.0.0.1")
    other.knock([door(responder)])
    deadline = time.monotonic() + 5
    while other.id not in responder.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {other.id, "127.0.0.1"} <= responder.heard
    other.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind(("127.0.0.2", 0))
        at = "127.0.0.1", responder.ports[0]
        for said in (b"an id", datagram("another", "an id"), datagram(SECRET, "the last")):
            stranger.sendto(said, at)
    while "the last" not in responder.heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "an id" not in responder.heard


def test_a_call_that_blocks_is_left_behind() -> None:
    ended = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.1, ended.wait)
    with pytest.raises(ZeroDivisionError):
        within(1, lambda: 1 // 0)
    works = {"blocks": ended.wait, "fails": lambda: 1 // 0, "ends": lambda: 7}
    assert all_within(0.3, works) == {"ends": 7}
    ended.set()
