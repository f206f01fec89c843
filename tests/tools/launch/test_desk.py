"""What ranks tell a driver elsewhere, and what strangers may not."""

from __future__ import annotations

import socket
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest

from shoal_tools.launch.desk import ERR, EXIT, HELLO, LOST, OUT, SIGNAL, Desk, Said

pytestmark = pytest.mark.quick
HERE, TOKEN = "127.0.0.1", "0123abcd"


def rank_at(desk: Desk, hello: bytes, token: str = TOKEN) -> Any:
    connection: Any = Client((HERE, desk.port), authkey=token.encode())
    connection.send_bytes(hello)
    return connection


def test_what_a_rank_says_comes_in_order_and_signals_go_the_other_way() -> None:
    with Desk(HERE, TOKEN, 2) as desk:
        rank = rank_at(desk, b"1 executor on host b")
        assert desk.next(30) == Said(1, HELLO, b"executor on host b")
        for message in (OUT + b"one\n", ERR + b"two\n", EXIT + b"0"):
            rank.send_bytes(message)
        assert [desk.next(30) for _ in range(3)] == [
            Said(1, OUT, b"one\n"),
            Said(1, ERR, b"two\n"),
            Said(1, EXIT, b"0"),
        ]
        desk.tell(1, SIGNAL + b"15")
        desk.tell(0, SIGNAL + b"15")  # who has not come is told nothing
        assert rank.recv_bytes() == SIGNAL + b"15"
        rank.close()
        assert desk.next(30) == Said(1, LOST)


def test_who_has_another_token_or_no_number_is_not_heard() -> None:
    with Desk(HERE, TOKEN, 2) as desk:
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            rank_at(desk, b"0 a stranger", "guessed").recv_bytes()
        silent = socket.create_connection((HERE, desk.port))
        for hello in (b"2 too many", b"-1 too few", b"no number"):
            with pytest.raises((EOFError, OSError)):
                rank_at(desk, hello).recv_bytes()
        with rank_at(desk, b"0 first") as own:
            assert desk.next(30) == Said(0, HELLO, b"first")
            with pytest.raises((EOFError, OSError)):
                rank_at(desk, b"0 in its place").recv_bytes()
            own.send_bytes(OUT + b"still here")
            assert desk.next(30) == Said(0, OUT, b"still here")
        silent.close()


def test_ranks_hear_that_the_driver_has_left() -> None:
    with Desk(HERE, TOKEN, 1) as desk:
        rank = rank_at(desk, b"0 here")
        assert desk.next(30) == Said(0, HELLO, b"here")
    began = time.monotonic()
    with pytest.raises((EOFError, OSError)):
        rank.recv_bytes()
    assert time.monotonic() - began < 30
    rank.close()
