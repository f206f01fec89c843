"""A run's record as a file of JSON, and as a page of HTML.

    {"format": 1, "written_by": "shoal.run", "run": {"title": …, "explanation": …, …}}

`run` is a `Record` (core/record.py), by the names of its fields. A change of those that a reader of
this format would not take raises FORMAT. Guarded by tests/tools/report/test_run_file.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.foresight import Foresight
from shoal.core.record import Record
from shoal_tools.report.page import page

FORMAT = 1
WRITTEN_BY = "shoal.run"
_FORM = f"a run's record of format {FORMAT}"
_REDO = "write one: shoal train RECIPE --report run.json (bench and simulate do so, too)"


class _Head(msgspec.Struct):
    """What every version has."""

    format: int
    written_by: str = ""


class _File(_Head, kw_only=True):
    """The file."""

    run: Record


def write(record: Record, path: Path) -> None:
    """Write a run's record: where the path ends in .json as it is, else drawn as a page.

    Raises:
        UsageError: it cannot be written there.
    """
    text = to_json(record) if path.suffix == ".json" else page(record)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {path}", got=str(error), do="give another path"
        ) from error


def to_json(record: Record) -> str:
    """A record as JSON text."""
    whole = _File(format=FORMAT, written_by=WRITTEN_BY, run=record)
    return msgspec.json.encode(whole, enc_hook=dict).decode() + "\n"


def load(path: Path) -> Record:
    """The record in a file.

    Raises:
        UsageError: the file cannot be read, is none of a run, or is one of another version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the run {path} cannot be read", got=str(error), do="check the path"
        ) from None
    return from_json(text, str(path))


def from_json(text: str, source: str = "the text") -> Record:
    """Read what `to_json` wrote (UsageError where it is something else)."""
    head = _decoded(text, _Head, source)
    if head.written_by != WRITTEN_BY:
        by = f"written by {head.written_by}" if head.written_by else "nobody's word who wrote it"
        raise _unread(source, by)
    if head.format != FORMAT:
        kind = "an older" if head.format < FORMAT else "a newer"
        raise _unread(source, f"format {head.format}, of {kind} version of Shoal")
    run: Record = _decoded(text, _File, source).run
    if run.simulation is not None:
        _check_simulation(run.simulation, source)
    return run


def _decoded(text: str, kind: type[Any], source: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unread(source, str(error)) from error


def _check_simulation(simulation: Foresight, source: str) -> None:
    """Refuse figures that no simulation has, and no curve can be drawn of."""
    if not simulation.scales:
        raise _unread(source, "a simulation of no hosts")
    for scale in simulation.scales:
        if scale.hosts < 1 or scale.step_s <= 0 or scale.times <= 0:
            raise _unread(
                source,
                f"{scale.hosts} hosts, a step of {scale.step_s} s, {scale.times} times one host",
            )


def _unread(source: str, got: str) -> UsageError:
    return UsageError(f"{source} is no run's record", got=got[:300], expected=_FORM, do=_REDO)
