"""Errors as the command line shows them: what a person needs to mend them, last."""

from __future__ import annotations

import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def foreign(error: Exception) -> str:
    """An error that is not Shoal's: the frames after Shoal's last one, or all where Shoal itself
    raised it.
    """
    trace = last = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
            last = trace.tb_next
        trace = trace.tb_next
    what = "the recipe failed" if last is not None else "Shoal failed, which is a bug in it"
    frames = traceback.format_exception(error.with_traceback(last or error.__traceback__))
    return f"{what}\n" + "".join(frames).rstrip()


def whole(error: Exception) -> str:
    """An error with all its frames, and with the errors that led to it."""
    return "".join(traceback.format_exception(error)).rstrip()
