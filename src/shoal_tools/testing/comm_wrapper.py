"""A Comm around another one, with the inner one's behaviour unless a wrapper changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shoal.contracts.comm import Comm
from shoal.core.errors import ShoalError

T = TypeVar("T")


class Around(Comm):
    """`inner` with other messages, channels and groups, which a wrapper defines.

    It keeps the collectives of the base class, which are made of such messages. The inner Comm's
    own collectives are not used, except `gather_objects`, which is for set-up.
    """

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.rank, self.journal = inner.rank, inner.journal
        self.size, self.topology, self.timeout_s = inner.size, inner.topology, inner.timeout_s

    def gather_objects(self, value: Any, purpose: str, *kinds: type) -> list[Any]:
        return self.inner.gather_objects(value, purpose, *kinds)

    def beside(self, call: Callable[[], T]) -> T:
        return self.inner.beside(call)

    def close(self) -> None:
        self.inner.close()

    @property
    def is_open(self) -> bool:
        return self.inner.is_open

    def reached(self, where: str) -> None:
        self.inner.reached(where)

    def leave(self, error: BaseException | None) -> None:
        self.inner.leave(error)

    def check(self, where: str, number: int | None = None) -> None:
        self.inner.check(where, number)

    def hear(self, *, again: bool = True) -> None:
        self.inner.hear(again=again)

    def unlike(self, rank: int, theirs: str, own: str) -> ShoalError:
        return self.inner.unlike(rank, theirs, own)

    def diagnose(self, error: BaseException, where: str) -> BaseException:
        return self.inner.diagnose(error, where)
