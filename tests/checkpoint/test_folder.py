"""A folder that is there whole or not at all, and what is left of a process that has ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import folder
from shoal.checkpoint.folder import STATE, as_path, check_names, found, replacing
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


@pytest.mark.parametrize("exists", [True, False])
def test_a_place_that_is_not_given_leaves_nothing(
    tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    if exists:
        put(path, "1")
    rename = Path.rename

    def refuse(one: Path, other: Path) -> Path:
        if ".tmp-" in one.name and other == path:
            raise OSError("no")
        return rename(one, other)

    monkeypatch.setattr(folder, "_changed_places", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        put(path, "2")
    assert os.listdir(tmp_path) == ["saved"] * exists
    assert not exists or (path / STATE).read_text() == "1"


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


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "other-disk" / "saved", tmp_path / "link"
    if exists:
        put(target, "1")
    link.symlink_to(target)
    put(link, "2")
    assert link.is_symlink() and os.listdir(target.parent) == ["saved"]
    assert (target / STATE).read_text() == "2"
    target.rename(target.with_name("saved.old-host-1-ab"))
    assert found(link) == target.with_name("saved.old-host-1-ab")


@pytest.mark.parametrize("path", [None, "", "a\0b", "\ud800", b"saved", 3, ["saved"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match=r"shoal.load takes the path of a folder"):
        as_path(path, "shoal.load")


@pytest.mark.parametrize("name", ["", "../x", "/etc/x", "a/b", "a\0b", "a\nb", "random-state"])
def test_a_name_that_no_file_of_the_folder_can_have(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be saved under that name"):
        check_names(["model", name])
    check_names(["model", "my model", "net.0", "..", "modèle"])
