"""A run's record as a file of JSON, and as a page of HTML.

    {"format": 1, "written_by": "shoal.run", "run": {"title": …, "explanation": …, …}}

`run` is a `Record` (core/record.py), by the names of its fields. In the file, the fields of the
predicted step are mixed with the explanation's. A change that a reader of this format could not
read must raise FORMAT. Guarded by tests/tools/report/test_run_file.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.explanation import PredictedStep
from shoal.core.foresight import Foresight
from shoal.core.record import Record
from shoal.core.regular_files import read_text
from shoal_tools.report.page import page

FORMAT = 1
WRITTEN_BY = "shoal.run"
_FORM = f"a run's record of format {FORMAT}"
_STEP = "step"  # the explanation's field that has no object of its own in the file
_STEP_FIELDS = [field.name for field in fields(PredictedStep)]
_REDO = "write one: shoal train RECIPE --report run.json (bench and simulate do so, too)"


class _FileHead(msgspec.Struct):
    """The fields that every version has."""

    format: int
    written_by: str = ""


class _File(_FileHead, kw_only=True):
    """The whole file."""

    run: Record


def write(record: Record, path: Path) -> None:
    """Write a run's record: as JSON if the path ends in .json, else as a page.

    Raises:
        UsageError: the path cannot be written.
    """
    text = to_json(record) if path.suffix == ".json" else page(record)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {path}", got=str(error), do="give another path"
        ) from error


def to_json(record: Record) -> str:
    """Return a record as JSON text."""
    whole = _File(format=FORMAT, written_by=WRITTEN_BY, run=record)
    plain = msgspec.to_builtins(whole, enc_hook=dict)
    if record.explanation is not None:
        plain["run"]["explanation"] = _with_flat_step(plain["run"]["explanation"])
    return msgspec.json.encode(plain).decode() + "\n"


def load(path: Path) -> Record:
    """Read the record in a file.

    Raises:
        UsageError: the file cannot be read, is no run's record, or has another format.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the run {path} cannot be read",
            got=str(error),
            do="check the path; write one: shoal train RECIPE --report run.json",
        ) from None
    return from_json(text, str(path))


def from_json(text: str, source: str = "the text") -> Record:
    """Read a record from the text of `to_json`. UsageError if it is something else."""
    head = _decode(text, _FileHead, source)
    if head.written_by != WRITTEN_BY:
        by = f"written by {head.written_by}" if head.written_by else "nobody's word who wrote it"
        raise _unread(source, by)
    if head.format != FORMAT:
        kind = "an older" if head.format < FORMAT else "a newer"
        raise _unread(source, f"format {head.format}, of {kind} version of Shoal")
    plain = _with_nested_step(_decode(text, dict[str, Any], source))
    try:
        run: Record = msgspec.convert(plain, _File).run
    except msgspec.ValidationError as error:
        raise _unread(source, str(error)) from error
    if run.simulation is not None:
        _check_simulation(run.simulation, source)
    return run


def _with_flat_step(explanation: Mapping[str, Any]) -> dict[str, Any]:
    """Mix the fields of the predicted step with the explanation's, as in the file."""
    flat: dict[str, Any] = {}
    for name, value in explanation.items():
        flat |= value if name == _STEP else {name: value}
    return flat


def _with_nested_step(plain: dict[str, Any]) -> dict[str, Any]:
    """Move the fields of the predicted step into an object of their own, as in `Explanation`."""
    run = plain.get("run")
    explanation = run.get("explanation") if isinstance(run, dict) else None
    if isinstance(explanation, dict):
        names = [name for name in _STEP_FIELDS if name in explanation]
        explanation[_STEP] = {name: explanation.pop(name) for name in names}
    return plain


def _decode(text: str, kind: type[Any], source: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _unread(source, str(error)) from error


def _check_simulation(simulation: Foresight, source: str) -> None:
    """Raise UsageError for figures that no simulation has, and no curve can show."""
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
