"""Calls that may block for ever, made on another thread than the caller's.

If a message is half sent or half received, gloo does not wake the waiting thread, however the
connection ends. It also does not look at the verdict while it makes connections. The caller's
thread must be able to end. So another thread makes the call, and the caller's thread looks around
every half second. A call that never returns keeps its thread, a daemon.

This costs one more switch of threads for each blocking call, about 10 µs. Guarded by
tests/comm/test_blocking_calls.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

T = TypeVar("T")

_LOOK_S = 0.5  # seconds between two looks of the waiting thread
OWN = "shoal-"  # prefix of the names of the library's own threads


def may_block() -> bool:
    """Return whether this thread is the library's own, so that no thread waits for it without a
    limit.
    """
    return threading.current_thread().name.startswith(OWN)


@final
class Aside:
    """Threads that make blocking calls for others. There are as many as calls at once."""

    def __init__(self) -> None:
        self._idle: list[_Helper] = []

    def run(self, call: Callable[[], T], look: Callable[[], object]) -> T:
        """Make a call on another thread. Return its result, or raise its error.

        Args:
            call: the call that may block.
            look: called every half second meanwhile. Its error is raised at once.
        """
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = _Helper()
        helper.begin(call)
        while not helper.done(_LOOK_S):
            look()  # if it raises, the helper thread stays in its call
        result: T
        result, error = helper.taken()
        self._idle.append(helper)
        if error is not None:
            raise error
        return result


@final
class _Helper:
    """One of the threads.

    It uses plain locks, because they are the quickest way to wake a thread.
    """

    def __init__(self) -> None:
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._call: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._serve, name=f"{OWN}aside", daemon=True).start()

    def begin(self, call: Callable[[], Any]) -> None:
        """Let the thread make a call."""
        self._call = call
        self._asked.release()

    def done(self, timeout_s: float) -> bool:
        """Wait for the end of the call, at most so long. Return whether it has ended."""
        return self._answered.acquire(timeout=timeout_s)

    def taken(self) -> tuple[Any, BaseException | None]:
        """Return the result and error, and drop the references."""
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
