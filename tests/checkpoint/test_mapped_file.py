"""Files in the memory of a host: written in place, and read as any safetensors file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint import tensors
from shoal.checkpoint.mapped_file import MappedFile

pytestmark = pytest.mark.quick
VALUES = {
    "a": torch.arange(7, dtype=torch.int16),
    "b": torch.randn(3, 5, dtype=torch.float64),
    "scalar": torch.tensor(3.0),
    "none": torch.empty(0, 4),
}
FORMS = {name: tensors.form_of(name, value) for name, value in VALUES.items()}


def test_tensors_are_written_in_place(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "one.safetensors")
    for turn in range(3):
        views = file.lay_out_tensors(FORMS)
        for name, value in VALUES.items():
            views[name].copy_(value + turn)
        number = os.stat(file.path).st_ino
        got = load_file(file.path)
        assert all(torch.equal(got[name], value + turn) for name, value in VALUES.items())
        assert tensors.read(file.path, file.checksums()).keys() == VALUES.keys()
        assert file.has(file.checksums())
    assert os.stat(file.path).st_ino == number
    file.path.unlink()  # somebody has removed it
    file.lay_out_tensors(FORMS)["a"].fill_(5)
    assert int(load_file(file.path)["a"].sum()) == 35


def test_another_form_needs_another_file(tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "one.safetensors")
    file.lay_out_tensors(FORMS)
    file.lay_out_tensors({"a": FORMS["a"]})["a"].copy_(VALUES["a"])
    assert [*load_file(file.path)] == ["a"]


@pytest.mark.parametrize("place", [0, 9, 30, -1])
def test_a_changed_byte_is_found(place: int, tmp_path: Path) -> None:
    file = MappedFile(tmp_path / "one.safetensors")
    for name, view in file.lay_out_tensors(FORMS).items():
        view.copy_(VALUES[name])
    checksums = file.checksums()
    file.memory[place] += 1
    assert not file.has(checksums)


def test_no_room_is_an_error_and_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = MappedFile(tmp_path / "one.safetensors")
    file.lay_out_tensors(FORMS)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        file.lay_out_tensors({**FORMS, "more": FORMS["b"]})
    assert file.path.stat().st_size == 0 and len(file.memory) == 0
