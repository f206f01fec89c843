"""Boards, by which all doctors learn the findings of each.

    ranks    the store of their job carries the values: all ranks reach it, or report a failure
    peers    each leaves its values with the peers that it reaches, and gets theirs: there is no
             store. A value crosses if either host reaches the other

Both are asked again and again until the time is over. If a host has once kept the others waiting,
they do not wait for it again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TypeVar, final

import msgspec

from shoal.contracts.store_values import Values
from shoal_tools.doctor.deadline import all_within, within
from shoal_tools.doctor.wire import Door, Responder, get, put

T = TypeVar("T")
_ASK_AGAIN_S = 0.03
_CALL_S = 1.0


class Board(ABC):
    """Board on which a host leaves its values, and reads the others'."""

    @abstractmethod
    def post(self, key: str, value: object) -> None:
        """Leave a value for the others. Raise OSError if that fails."""

    @abstractmethod
    def read(self, hosts: Sequence[str], key: str, kind: type[T]) -> dict[str, T]:
        """Return the values that hosts have left, without hosts that have left none."""


@final
class StoreBoard(Board):
    """Board in the store of the job.

    Args:
        values: the values in the store.
        me: this host's name, as others pass it to `read`.
    """

    def __init__(self, values: Values, me: str, timeout_s: float = 5.0) -> None:
        self._values, self._me, self._timeout_s = values, me, timeout_s

    def post(self, key: str, value: object) -> None:
        within(self._timeout_s, lambda: self._values.write(f"{key}/{self._me}", value))

    def read(self, hosts: Sequence[str], key: str, kind: type[T]) -> dict[str, T]:
        def read_all() -> dict[str, T]:
            found = {host: self._values.read(f"{key}/{host}", kind) for host in hosts}
            return {host: value for host, value in found.items() if value is not None}

        return within(self._timeout_s, read_all)


@final
class PeerBoard(Board):
    """Board of values that hosts leave with each other."""

    def __init__(self, responder: Responder, secret: str) -> None:
        self.doors: dict[str, Door] = {}  # doors of hosts that this one reaches
        self._responder, self._secret = responder, secret

    def post(self, key: str, value: object) -> None:
        text = msgspec.json.encode(value).decode()
        self._responder.outbox[key] = text
        own = f"{self._responder.id}/{key}"
        left = {
            host: partial(put, door, self._secret, own, text) for host, door in self.doors.items()
        }
        all_within(_CALL_S, left)

    def read(self, hosts: Sequence[str], key: str, kind: type[T]) -> dict[str, T]:
        texts = {host: self._responder.inbox.get(f"{host}/{key}", "") for host in hosts}
        asked = {
            host: partial(get, self.doors[host], self._secret, key)
            for host in hosts
            if not texts[host] and host in self.doors
        }
        texts |= all_within(_CALL_S, asked)
        found = dict[str, T]()
        for host, text in texts.items():
            try:
                if text:
                    found[host] = msgspec.json.decode(text, type=kind)
            except Exception:  # any error: without a token the text may be a stranger's
                continue
        return found


@final
class Circle:
    """Circle of an examination's hosts, which send each other their findings."""

    def __init__(self, board: Board, me: str, others: Sequence[str]) -> None:
        self.me, self.others = me, tuple(others)
        # hosts that kept the others waiting, with the key that they did not bring
        self.lost = dict[str, str]()
        self._board = board

    def gather(self, key: str, value: T, timeout_s: float) -> dict[str, T]:
        """Return the values of all hosts that bring one in time, by host, in the order of hosts."""
        found, deadline = {self.me: value}, time.monotonic() + timeout_s
        waiting = [host for host in self.others if host not in self.lost]
        try:
            self._board.post(key, value)
            while waiting:
                found |= self._board.read(waiting, key, type(value))
                waiting = [host for host in waiting if host not in found]
                if time.monotonic() > deadline:
                    break
                if waiting:
                    time.sleep(_ASK_AGAIN_S)
        except (OSError, RuntimeError) as error:  # the store is gone
            self.lost |= dict.fromkeys(waiting, f"{key}: {str(error).splitlines()[0]}")
            return found
        self.lost |= dict.fromkeys(waiting, key)
        return found
