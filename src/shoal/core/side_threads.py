"""Threads that exchange something beside the thread on which a rank trains.

That a rank waits is judged by its own thread alone (comm/places.py). While that one works, what a
side thread waits for says nothing of whether the rank goes on.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


class _OfThread(threading.local):
    is_beside = False


_of_thread = _OfThread()


def side_threads(num: int, name: str) -> ThreadPoolExecutor:
    """So many threads whose names begin so."""
    return ThreadPoolExecutor(num, thread_name_prefix=name, initializer=_say_so)


def is_side_thread() -> bool:
    """Whether the calling thread is one of them."""
    return _of_thread.is_beside


def _say_so() -> None:
    _of_thread.is_beside = True
