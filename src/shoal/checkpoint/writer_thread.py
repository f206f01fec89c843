"""Writes one checkpoint after another during training, on a thread that gives way to others."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

_NICER = 5  # the thread is nicer by this, if the system can set it


@final
class Background:
    """Makes at most one write at a time.

    Args:
        failed: a function that receives an error, on that thread.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._thread: threading.Thread | None = None
        self._alone = True
        self._error: BaseException | None = None  # error of the last write

    @property
    def is_busy(self) -> bool:
        """Whether a write is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None], *, alone: bool) -> None:
        """Begin a write, once the one before is done. `alone` says that it needs no other rank."""
        self.wait()
        self._error, self._alone = None, alone
        name = "shoal-checkpoint"
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        atexit.register(self._at_exit)  # the thread is a daemon
        self._thread.start()

    def wait(self, *, broken: bool = False) -> None:
        """Wait until nothing is being written; not for lost ranks, if something is `broken`."""
        if self._thread is not None and (self._alone or not broken):
            self._thread.join()
            self._thread = None
            # the registration would keep everything alive that there is to save
            atexit.unregister(self._at_exit)

    def finish(self) -> None:
        """Wait until nothing is being written. Raise the error of the last write, once."""
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _at_exit(self) -> None:
        self.wait(broken=getattr(sys, "last_value", None) is not None)

    def _run(self, work: Callable[[], None]) -> None:
        with suppress(OSError):  # the priority is this thread's alone, on Linux
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
        try:
            work()
        except BaseException as error:
            self._error = error
            self._failed(error)
