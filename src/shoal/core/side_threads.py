"""Threads that exchange data while a rank trains on another thread.

Whether a rank waits is judged by its main thread alone (comm/wait_places.py). As long as that
thread works, the waiting of a side thread does not show whether the rank goes on.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class _OfThread(threading.local):
    is_beside = False


_of_thread = _OfThread()


def side_threads(num: int, name: str) -> ThreadPoolExecutor:
    """Make a pool of so many threads. Their names begin with `name`."""
    return ThreadPoolExecutor(num, thread_name_prefix=name, initializer=_say_so)


def is_side_thread() -> bool:
    """Return whether the calling thread is a side thread."""
    return _of_thread.is_beside


def _say_so() -> None:
    _of_thread.is_beside = True
