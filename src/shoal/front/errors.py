"""Errors in the form that people see: the part that helps to mend them comes last."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from shoal.core.errors import ShoalError
from shoal.core.open_files import ran_out, too_few

_PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("shoal", "shoal_tools"))
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_INSTALLED = ("site-packages", "dist-packages")


def foreign(error: BaseException) -> str:
    """Describe an error that is not Shoal's, with the frames after Shoal's last one.

    All frames are shown if Shoal itself raised it, or called Python's own library, which raised it.
    """
    after = error.__traceback__
    for frame in _frames(error):
        if _is_shoals(frame):
            after = frame.tb_next
    own = after is None or all(map(_is_pythons, _traces_from(after)))
    if own and ran_out(error):
        return str(too_few(where=str(error)))
    what = "Shoal failed, which is a bug in it" if own else "the recipe failed"
    frames = traceback.format_exception(error.with_traceback(error.__traceback__ if own else after))
    return f"{what}\n" + "".join(frames).rstrip()


def exit_of_recipe(error: SystemExit) -> str | None:
    """Explain an exit that the recipe asked for. Return None if Shoal itself ends."""
    *_, last = _frames(error)
    there = [frame for frame in _frames(error) if not (_is_shoals(frame) or _is_pythons(frame))]
    if _is_shoals(last) or not there:
        return None
    place = f"{there[-1].tb_frame.f_code.co_filename}, line {there[-1].tb_lineno}"
    return str(
        ShoalError(
            "the recipe ended the process",
            where=place,
            got=f"sys.exit({error.code!r})",
            do="leave it out, or put it under: if __name__ == '__main__'",
        )
    )


def whole(error: BaseException) -> str:
    """Return an error with all its frames, and with the errors that led to it."""
    return "".join(traceback.format_exception(error)).rstrip()


def show_messages_only() -> None:
    """Let an uncaught error of Shoal end a script with its message alone, without frames.

    Other errors look as ever. A program with its own way to show errors keeps it.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ShoalError):
        sys.__excepthook__(kind, error, trace)
        return
    script = [f for f in _frames(error) if not (_is_shoals(f) or _is_installed(f))]
    if script:  # the line of the script that asked for it
        code = script[-1].tb_frame.f_code
        print(f'File "{code.co_filename}", line {script[-1].tb_lineno}', file=sys.stderr)
    print(f"shoal: {error}", file=sys.stderr, flush=True)


def _frames(error: BaseException) -> Iterator[TracebackType]:
    yield from _traces_from(error.__traceback__)


def _traces_from(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_shoals(frame: TracebackType) -> bool:
    path = Path(frame.tb_frame.f_code.co_filename)
    return any(path.is_relative_to(package) for package in _PACKAGES)


def _is_installed(frame: TracebackType) -> bool:
    """Return whether a frame is of an installed package, such as torch, or of Python's library."""
    code = frame.tb_frame.f_code
    if code.co_filename == "<string>" and code.co_name == "__init__":  # made by dataclasses
        return True
    return any(each in Path(code.co_filename).parts for each in _INSTALLED) or _is_pythons(frame)


def _is_pythons(frame: TracebackType) -> bool:
    """Return whether a frame is of Python's own library, or of Shoal's parser of command lines."""
    path = Path(frame.tb_frame.f_code.co_filename)
    if "click" in path.parts:
        return True
    installed = any(each in path.parts for each in _INSTALLED)
    return not installed and (path.is_relative_to(_LIBRARY) or path.name.startswith("<frozen"))
