"""Calls that may block for ever, made beside the thread that wants them.

Gloo wakes nobody who waits for a message that is half sent or half received, however its connection
ends, and it takes no look at the verdict while it makes connections. So the caller's thread, which
must be able to end, has a thread of its own make the call, and looks around in pieces of half a
second. A call that never returns keeps that thread, a daemon.

Costs one more switch of threads where a call blocks, some 10 µs. Guarded by
tests/comm/test_aside.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

T = TypeVar("T")

_LOOK_S = 0.5  # how often who waits looks around
OWN = "shoal-"  # what the names of the library's own threads begin with


def may_block() -> bool:
    """Whether this thread is the library's own: nobody waits for it without a limit."""
    return threading.current_thread().name.startswith(OWN)


@final
class Aside:
    """Threads that make blocking calls for others; as many as there are calls at once."""

    def __init__(self) -> None:
        self._idle: list[_Helper] = []

    def run(self, call: Callable[[], T], look: Callable[[], object]) -> T:
        """Make a call on another thread, and give what it gives or raise what it raises.

        Args:
            call: what may block.
            look: called every half second meanwhile; what it raises is raised at once.
        """
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = _Helper()
        helper.begin(call)
        while not helper.done(_LOOK_S):
            look()  # if it raises, the helper is left to its call
        result: T
        result, error = helper.taken()
        self._idle.append(helper)
        if error is not None:
            raise error
        return result


@final
class _Helper:
    """One of the threads. Plain locks, as they are the quickest way to wake a thread."""

    def __init__(self) -> None:
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._call: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name=f"{OWN}aside", daemon=True).start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Have the thread make a call."""
        self._call = call
        self._asked.release()

    def done(self, timeout_s: float) -> bool:
        """Wait so long for its end; whether that has come."""
        return self._answered.acquire(timeout=timeout_s)

    def taken(self) -> tuple[Any, BaseException | None]:
        """What came of it, of which nothing is kept."""
        result, error = self._result, self._error
        self._result = self._error = None
        return result, error

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            call, self._call = self._call, None
            assert call is not None
            try:
                self._result = call()
            except BaseException as error:
                self._error = error
            del call  # hold no tensors while idle
            self._answered.release()
