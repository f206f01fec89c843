"""A folder that is there whole or not at all, and what is left of a process that has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.checkpoint import folder
from shoal.checkpoint.folder import STATE, found, replacing
from shoal.core.errors import UsageError


def put(path: Path, text: str) -> None:
    with replacing(path) as new:
        (new / STATE).write_text(text)


def test_it_gets_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "saved"
    with replacing(path) as new:
        assert not path.exists()
        (new / STATE).write_text("1")
    assert (path / STATE).read_text() == "1"
    assert os.listdir(path.parent) == ["saved"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_it_takes_the_place_of_an_older_one(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    if not exchanges:
        monkeypatch.setattr(folder, "_changed_places", lambda one, other: False)
    put(path, "1")
    put(path, "2")
    assert (path / STATE).read_text() == "2"
    assert os.listdir(tmp_path) == ["saved"]


def test_an_error_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    put(path, "1")
    with pytest.raises(KeyError), replacing(path) as new:
        (new / STATE).write_text("2")
        raise KeyError
    assert (path / STATE).read_text() == "1"
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("name", ["saved", "lr[0.1]*"])
def test_between_two_renames_the_older_one_is_found(tmp_path: Path, name: str) -> None:
    path, old = tmp_path / name, tmp_path / f"{name}.old-host-1-ab"
    put(path, "1")
    path.rename(old)
    assert found(path) == old
    assert found(tmp_path / "other") is None


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_something_else_of_that_name_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "saved"
    if kind == "folder":
        path.mkdir()
        (path / "thesis.txt").touch()
    else:
        path.touch()
    with pytest.raises(UsageError, match="something else"), replacing(path):
        pass
    assert path.exists()
    assert os.listdir(tmp_path) == ["saved"]


def test_what_a_process_that_ended_left_is_removed(tmp_path: Path) -> None:
    host, own = folder._host(), os.getpid()
    names = {
        "of one that has ended": f"saved.tmp-{host}-4194399-aa",  # above the largest number of one
        "of this one": f"saved.tmp-{host}-{own}-bb",
        "of another host": "saved.tmp-elsewhere-4194399-cc",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
    put(tmp_path / "saved", "1")
    assert set(os.listdir(tmp_path)) == {"saved", *list(names.values())[1:]}
