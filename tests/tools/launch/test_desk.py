"""What ranks tell a driver elsewhere, and what strangers may not."""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

import pytest

from shoal_tools.launch import desk
from shoal_tools.launch.desk import (
    ERR,
    EXIT,
    HELLO,
    LOST,
    OUT,
    SIGNAL,
    Desk,
    Said,
    call_desk,
)

pytestmark = pytest.mark.quick
HERE, TOKEN = "127.0.0.1", "0123abcd"


def rank_at(made: Desk, hello: bytes, token: str = TOKEN) -> Any:
    connection: Any = Client((HERE, made.port), authkey=token.encode())
    connection.send_bytes(hello)
    return connection


def test_what_a_rank_says_comes_in_order_and_signals_go_the_other_way() -> None:
    with Desk(HERE, TOKEN, 2) as made:
        rank = rank_at(made, b"1 executor on host b")
        assert made.next(30) == Said(1, HELLO, b"executor on host b")
        for message in (OUT + b"one\n", ERR + b"two\n", EXIT + b"0"):
            rank.send_bytes(message)
        assert [made.next(30) for _ in range(3)] == [
            Said(1, OUT, b"one\n"),
            Said(1, ERR, b"two\n"),
            Said(1, EXIT, b"0"),
        ]
        made.tell(1, SIGNAL + b"15")
        made.tell(0, SIGNAL + b"15")  # who has not come is told nothing
        assert rank.recv_bytes() == SIGNAL + b"15"
        rank.close()
        assert made.next(30) == Said(1, LOST)


def test_who_has_another_token_or_no_number_is_not_heard() -> None:
    with Desk(HERE, TOKEN, 2) as made:
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            rank_at(made, b"0 a stranger", "guessed").recv_bytes()
        silent = socket.create_connection((HERE, made.port))
        for hello in (b"2 too many", b"-1 too few", b"no number"):
            with pytest.raises((EOFError, OSError)):
                rank_at(made, hello).recv_bytes()
        with rank_at(made, b"0 first") as own:
            assert made.next(30) == Said(0, HELLO, b"first")
            with pytest.raises((EOFError, OSError)):
                rank_at(made, b"0 in its place").recv_bytes()
            own.send_bytes(OUT + b"still here")
            assert made.next(30) == Said(0, OUT, b"still here")
        silent.close()


def test_silent_strangers_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "_STRANGERS", 3)
    with Desk(HERE, TOKEN, 2) as made:
        before = threading.active_count()
        silent = [socket.create_connection((HERE, made.port)) for _ in range(100)]
        rank = call_desk((HERE, made.port), TOKEN)
        rank.send_bytes(b"1 here")
        assert made.next(30) == Said(1, HELLO, b"here")
        assert threading.active_count() - before <= 2 + 3 + 1
        silent += [socket.create_connection((HERE, made.port)) for _ in range(100)]
        rank.send_bytes(OUT + b"still here")
        assert made.next(30) == Said(1, OUT, b"still here")
        for each in (*silent, rank):
            each.close()


def test_a_rank_that_is_put_out_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as listener:

        def answer() -> None:
            listener.accept()[0].close()  # among strangers
            caller = Connection(listener.accept()[0].detach())
            deliver_challenge(caller, TOKEN.encode())
            answer_challenge(caller, TOKEN.encode())
            caller.close()

        thread = threading.Thread(target=answer)
        thread.start()
        call_desk(listener.getsockname(), TOKEN).close()
        thread.join()
    monkeypatch.setattr(desk, "_CALL_S", 0.0)
    with socket.create_server((HERE, 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        with pytest.raises(ConnectionError, match="the connection ended"):
            call_desk(listener.getsockname(), TOKEN)
        thread.join()


def test_ranks_hear_that_the_driver_has_left() -> None:
    with Desk(HERE, TOKEN, 1) as made:
        rank = rank_at(made, b"0 here")
        assert made.next(30) == Said(0, HELLO, b"here")
    began = time.monotonic()
    with pytest.raises((EOFError, OSError)):
        rank.recv_bytes()
    assert time.monotonic() - began < 30
    rank.close()
