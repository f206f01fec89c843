"""Marks: small files that name the generation of the files next to them.

    rank-3.json    for rank-3.safetensors: the pieces that rank 3 has of tensors and states
    whole.json     for state.json and the files of whole tensors

A generation is a snapshot of all ranks at one step. Its marks are written last, once all ranks have
agreed that every host has its files. They are removed before a file is written again. So an
existing mark is true. Guarded by tests/checkpoint/test_marks.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.checkpoint.extents import Extent
from shoal.checkpoint.folder import remove, write_text
from shoal.checkpoint.tensors import Checksums, checksum
from shoal.core.regular_files import read_bytes

FORMAT = "shoal generation 1"
WHOLE = "whole"
T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """A snapshot of a run, taken by all ranks at one step.

    Args:
        run: id of the run.
        number: one more than that of the generation before.
        step: steps that the run had made.
        ranks: number of ranks.
    """

    run: str
    number: int
    step: int
    ranks: int


@dataclass(frozen=True)
class Entry:
    """A piece of a tensor, or a value of a state, that one rank has.

    Args:
        keyword: the object that it belongs to.
        name: the tensor in the file of that object; "" for a value that `keys` lead to.
        keys: keys that lead to the value, within the object.
        tensor: the tensor's name in the file of pieces; "" for plain data.
        extent: its place in the whole tensor, if it is a piece.
        value: plain data, as checkpoint/tree.py encodes it.
    """

    keyword: str
    name: str = ""
    keys: tuple[str, ...] = ()
    tensor: str = ""
    extent: Extent | None = None
    value: Any = None


@dataclass(frozen=True)
class PiecesMark:
    """Mark of the pieces that one rank has."""

    generation: Generation
    rank: int
    entries: tuple[Entry, ...]
    files: dict[str, Checksums] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeMark:
    """Mark of a host's whole tensors and of its state.json.

    Args:
        generation: the generation.
        text_crc: checksum of state.json.
        files: names of the files of tensors.
    """

    generation: Generation
    text_crc: str
    files: tuple[str, ...]


def unit_of(rank: int) -> str:
    """Return the name that a rank's pieces have."""
    return f"rank-{rank}"


def text_of(mark: PiecesMark | WholeMark) -> str:
    """Return the text of a mark's file."""
    content = msgspec.to_builtins(mark)
    crc = checksum(json.dumps(content, separators=(",", ":")).encode())
    return json.dumps({"format": FORMAT, "crc32": crc, "mark": content}) + "\n"


def parse_mark(kind: type[T], text: bytes) -> T | None:
    """Return the mark in a text; None if the text holds no mark of that kind."""
    try:
        document = json.loads(text)
        content = document["mark"]
        crc = checksum(json.dumps(content, separators=(",", ":")).encode())
        if document["format"] != FORMAT or document["crc32"] != crc:
            return None
        return msgspec.convert(content, kind)
    except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError):
        return None


def read_mark(kind: type[T], folder: Path, unit: str) -> T | None:
    """Return the mark of a unit in a folder; None if there is none."""
    try:
        return parse_mark(kind, read_bytes(path_of(folder, unit)))
    except OSError:
        return None


def write_mark(mark: PiecesMark | WholeMark, folder: Path, unit: str) -> None:
    """Write a mark."""
    write_text(path_of(folder, unit), text_of(mark))


def remove_mark(folder: Path, unit: str) -> None:
    """Remove a mark, if it is there."""
    remove(path_of(folder, unit))


def path_of(folder: Path, unit: str) -> Path:
    """Return the path of a unit's mark."""
    return folder / f"{unit}.json"
