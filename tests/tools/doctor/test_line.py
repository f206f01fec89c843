"""Signed lines: nobody without the key adds one, changes one, or sends one again."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shoal_tools.doctor.line import Line, UnprovedError, datagram, datagram_id

pytestmark = pytest.mark.quick
CALLER, RESPONDER = (b"caller", b"responder"), (b"responder", b"caller")
Ends = tuple[Line, Line]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Both ends of a connection that is signed."""
    first, second = socket.socketpair()
    with first, second:
        caller, responder = Line(first, 1.0), Line(second, 1.0)
        caller.sign(b"key", CALLER)
        responder.sign(b"key", RESPONDER)
        yield caller, responder


def sent(line: Line, value: Any) -> bytes:
    """A signed line as bytes, which reaches nobody."""
    wire, end = socket.socketpair()
    with wire, end:
        line.connection, own = wire, line.connection
        line.say(value)
        line.connection = own
        return end.recv(10_000)


def test_values_cross_both_ways(ends: Ends) -> None:
    caller, responder = ends
    for value in (1, 2):
        caller.say(value)
        assert responder.hear(int) == value
        responder.say(f"heard {value}")
        assert caller.hear(str) == f"heard {value}"


def test_another_key_or_a_changed_value_is_refused(ends: Ends) -> None:
    caller, responder = ends
    responder.connection.sendall(sent(caller, 7).replace(b"7\n", b"8\n"))
    stranger = Line(caller.connection, 1.0)
    stranger.sign(b"guessed", CALLER)
    stranger.say(7)
    caller.connection.sendall(b"7\n")
    for _ in range(2):
        with pytest.raises(UnprovedError):
            responder.hear(int)


@pytest.mark.parametrize("way", ["twice", "back", "skipped"])
def test_a_line_counts_once_at_its_place_and_one_way(ends: Ends, way: str) -> None:
    caller, responder = ends
    said = sent(caller, 7)
    if way == "twice":
        caller.connection.sendall(said + said)
        assert responder.hear(int) == 7
    elif way == "skipped":
        caller.say(8)
    else:
        responder.connection.sendall(said)
    with pytest.raises(UnprovedError):
        (caller if way == "back" else responder).hear(int)


def test_who_has_not_proved_himself_says_little(ends: Ends) -> None:
    caller, responder = ends
    caller.connection.sendall(b"x" * 5000)
    with pytest.raises(ConnectionError, match="ended within"):
        responder.hear(str)
    caller, responder = Line(caller.connection, 1.0), Line(responder.connection, 1.0)
    caller.sign(b"key", CALLER)
    responder.sign(b"key", RESPONDER)
    caller.say("proof")
    caller.say("x" * 5000)
    assert responder.hear(str) == "proof"
    assert responder.hear(str) == "x" * 5000


def test_a_datagram_tells_an_id_with_its_signature() -> None:
    assert datagram_id("secret", datagram("secret", "id")) == "id"
    for said in (datagram("another", "id"), datagram("secret", "id")[1:], b"id", b"", b"\xff" * 99):
        assert datagram_id("secret", said) is None
