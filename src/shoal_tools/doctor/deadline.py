"""Calls that may block for ever, each with a deadline.

A name server that is away, or a store that was stopped, may block for any time. So the call runs on
a thread of its own. When its time is over the thread is abandoned, and ends with the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, cast

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def within(timeout_s: float, work: Callable[[], T]) -> T:
    """Return the result of `work`, or raise its error.

    Raises:
        TimeoutError: it did not end in time.
    """
    results = _start({0: work})
    try:
        _, value, error = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return cast(T, value)


def all_within(timeout_s: float, works: Mapping[K, Callable[[], T]]) -> dict[K, T]:
    """Run several works side by side.

    Return the results of all that end in time without an error.
    """
    results = _start(works)
    deadline, found = time.monotonic() + timeout_s, dict[K, T]()
    for _ in works:
        try:
            key, value, error = results.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if error is None:
            found[key] = cast(T, value)
    return found


def _start(
    works: Mapping[K, Callable[[], T]],
) -> queue.SimpleQueue[tuple[K, T | None, Exception | None]]:
    results: queue.SimpleQueue[tuple[K, T | None, Exception | None]] = queue.SimpleQueue()

    def run(key: K, work: Callable[[], T]) -> None:
        try:
            results.put((key, work(), None))
        except Exception as error:
            results.put((key, None, error))

    for key, work in works.items():
        threading.Thread(
            target=run, args=(key, work), name="shoal-doctor-deadline", daemon=True
        ).start()
    return results
