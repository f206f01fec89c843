"""Marks are read as they were written, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.checkpoint.extents import Extent
from shoal.checkpoint.marks import (
    WHOLE,
    Entry,
    Generation,
    PiecesMark,
    WholeMark,
    parse_mark,
    read_mark,
    remove_mark,
    text_of,
    write_mark,
)

pytestmark = pytest.mark.quick
GENERATION = Generation("f" * 32, 7, 140, 4)
ENTRIES = (
    Entry("model", "weight", tensor="0", extent=Extent((2, 3), (3, 1), (1, 3), (3, 1), 3)),
    Entry("optimizer", keys=("state", "weight", "step"), value={"$": "float", "value": "nan"}),
)
PIECES = PiecesMark(GENERATION, 3, ENTRIES, {"rank-3.safetensors": {"": "0", "0": "1"}})
WHOLES = WholeMark(GENERATION, "0a1b2c3d", ("model.safetensors",))


def test_marks_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_mark(PIECES, tmp_path, "rank-3")
    write_mark(WHOLES, tmp_path, WHOLE)
    assert read_mark(PiecesMark, tmp_path, "rank-3") == PIECES
    assert read_mark(WholeMark, tmp_path, WHOLE) == WHOLES
    assert read_mark(WholeMark, tmp_path, "rank-3") is None
    remove_mark(tmp_path, "rank-3")
    assert read_mark(PiecesMark, tmp_path, "rank-3") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: text[:-9],
        lambda text: text.replace(b"140", b"150"),
        lambda text: text.replace(b"generation 1", b"generation 2"),
        lambda text: b"[" * 100_000,
        lambda text: b"\xff" + text,
    ],
)
def test_nothing_else_is_taken_for_a_mark(change: object) -> None:
    assert callable(change)
    assert parse_mark(PiecesMark, change(text_of(PIECES).encode())) is None
