"""What was measured is found again, and whatever is wrong with a file costs a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.core import cache_folder
from shoal_tools.cli import main

KEY = "two hosts"
VALUE = {"seconds": 0.1 + 0.2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def found(key: str = KEY) -> tuple[dict[str, float] | None, list[str]]:
    """What is read, and what is said."""
    said: list[str] = []
    entry = cache_folder.read("links", key, dict[str, float], said.append)
    return (None if entry is None else entry.value), said


def test_a_value_is_found_by_its_key_to_the_bit(folder: Path) -> None:
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    assert found() == (VALUE, [])
    assert found("three hosts") == (None, [])
    assert [path.parent for path in cache_folder.entries()] == [folder]
    assert not [*folder.glob(".new*")]


@pytest.mark.parametrize("off", cache_folder.OFF)
def test_nothing_is_kept_where_the_user_wants_none(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", off)
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    assert (found(), cache_folder.folder(), cache_folder.entries()) == ((None, []), None, [])


def test_the_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHOAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.folder() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder.folder() == Path("~/.cache/shoal").expanduser()


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    monkeypatch.delenv("SHOAL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    assert (found(), cache_folder.folder()) == ((None, []), None)


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\x00",
        b"[1, 2]",
        b'{"format": 1, "key": "two hosts", "written": "today", "value": {"seconds": "long"}}',
        b'{"format": 2, "key": "two hosts", "written": "today", "value": {"seconds": 1}}',
        b'{"format": 1, "key": "other hosts", "written": "today", "value": {"seconds": 1}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_or_foreign_file_costs_a_line_and_is_replaced(text: bytes, folder: Path) -> None:
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    (path,) = cache_folder.entries()
    path.write_bytes(text)
    value, said = found()
    assert value is None
    assert len(said) == 1 and str(path) in said[0] and "\n" not in said[0]
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    assert found() == (VALUE, [])


def test_a_folder_that_cannot_be_written_costs_a_line(folder: Path) -> None:
    folder.write_text("a file, and no folder")
    said: list[str] = []
    for _ in range(2):  # told once
        cache_folder.write("links", KEY, VALUE, said.append)
    assert len(said) == 1 and str(folder) in said[0] and "SHOAL_CACHE" in said[0]
    assert found()[0] is None


def test_something_else_in_a_files_place_is_not_waited_for(folder: Path) -> None:
    path = cache_folder.path_of("links", KEY)
    assert path is not None
    path.mkdir(parents=True)
    value, said = found()
    assert value is None and "a folder" in said[0]


def test_a_file_that_cannot_be_deleted_is_named(folder: Path) -> None:
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    (path,) = cache_folder.entries()
    path.unlink()
    path.mkdir()
    shown = CliRunner().invoke(main, ["cache", "--clear"])
    assert shown.exit_code == 2
    assert str(path) in shown.output


def test_the_command_lists_and_deletes(folder: Path) -> None:
    cache_folder.write("links", KEY, VALUE, pytest.fail)
    (path,) = cache_folder.entries()
    (folder / "model-0.json").write_text("damaged")
    listed = CliRunner().invoke(main, ["cache"]).output
    assert path.name in listed and "cannot be read" in listed and "2 files" in listed
    assert CliRunner().invoke(main, ["cache", "--clear"]).exit_code == 0
    assert cache_folder.entries() == []
