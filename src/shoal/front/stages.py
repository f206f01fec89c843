"""Lines that `parallelize` logs while it works: one a stage on rank 0, by the logger "shoal".

If the program has set up no logging, the lines go to stderr, so that they are seen without any
setting. `logging.getLogger("shoal").setLevel(logging.WARNING)` silences them.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import final

LOGGER = logging.getLogger("shoal")
if LOGGER.level == logging.NOTSET:  # otherwise the program has chosen a level
    LOGGER.setLevel(logging.INFO)

_WORTH_A_LINE_S = 0.05


@final
class Stages:
    """Logs how long each stage took.

    Args:
        speaks: whether this rank is the one that logs.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._began_s = time.perf_counter()

    def done(self, what: str) -> None:
        """Log that a stage is over. It began at the end of the last one."""
        now_s = time.perf_counter()
        seconds, self._began_s = now_s - self._began_s, now_s
        if seconds >= _WORTH_A_LINE_S:
            self.say(f"{what} … {seconds:.1f} s")

    def say(self, text: str) -> None:
        """Log a line, unless it is empty. No error in it stops training."""
        if text and self._speaks and LOGGER.isEnabledFor(logging.INFO):
            with suppress(Exception):
                _log(text)


def _log(text: str) -> None:
    if LOGGER.hasHandlers():
        LOGGER.info(text)
        return
    # only for this line: the program may set up its logging later
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("shoal: %(message)s"))
    handler.handle(LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, text, (), None))
