"""A run's folder: the newest complete checkpoint, the last few, and one job at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint.folder import LATEST, STATE, replacing
from shoal.checkpoint.run import RunFolder, name_of, step_of
from shoal.core.errors import UsageError


def put(run: RunFolder, step: int, keep: int = 3) -> None:
    with replacing(run.folder / name_of(step)) as new:
        (new / STATE).write_text("{}")
    os.utime(run.folder / name_of(step) / STATE, (step, step))
    run.put_latest(name_of(step), keep)


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.folder.iterdir())


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (5, 10, 15, 20):
        put(run, step, keep=2)
    assert names(run) == [LATEST, name_of(15), name_of(20)]
    assert run.newest() == name_of(20)


def test_what_is_newer_by_time_stays_though_it_has_fewer_steps(tmp_path: Path) -> None:
    """As where somebody went back to an older one."""
    run = RunFolder(tmp_path)
    for step in (10, 20):
        put(run, step)
    with replacing(run.folder / name_of(5)) as new:
        (new / STATE).write_text("{}")
    run.put_latest(name_of(5), keep=2)
    assert run.newest() == name_of(5)
    assert names(run) == [LATEST, name_of(5), name_of(20)]


def test_without_latest_the_one_of_most_steps_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.newest() is None
    put(run, 99_999_999)
    put(run, 100_000_000)
    for text in ("", "step-00000007", "../other"):
        (tmp_path / LATEST).write_text(text)
        assert run.newest() == name_of(100_000_000)
    (tmp_path / LATEST).unlink()
    (tmp_path / name_of(200_000_000)).mkdir()  # not complete
    assert run.newest() == name_of(100_000_000)


@pytest.mark.parametrize("name", ["step-1", "step-00000001.tmp-a", "other", "step-0000000a"])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert step_of(name) is None
    assert step_of(name_of(7)) == 7


def test_one_job_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.lock()
    with pytest.raises(UsageError, match=rf"another job(.|\n)*process {os.getpid()} on "):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_killed_job_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys; lock = open(sys.argv[1], 'a+')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX); os.kill(os.getpid(), 9)"
    )
    lock = str(tmp_path / "LOCK")
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code, lock], check=False)
    assert ended.returncode == -9
    (tmp_path / "step-00000001.tmp-host-1-aa").mkdir()
    run = RunFolder(tmp_path)
    run.lock()
    assert names(run) == ["LOCK"]
    run.unlock()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    way_out = (
        f"cannot be written there(.|\n)*do this: give another folder: {tmp_path}/file is a file"
    )
    with pytest.raises(UsageError, match=way_out):
        RunFolder(tmp_path / "file" / "run").lock()


def test_only_what_shoal_made_is_removed(tmp_path: Path) -> None:
    mine = {"notes.tmp-mine", "photos.tmp-1", "step-1.tmp-host-1-aa", "step-00000001.tmp-mine"}
    killed = {"step-00000001.tmp-host-1-aa", "LATEST.tmp-a.b-c-77-0f", "step-00000002.tmp-gone"}
    for name in mine | killed:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    run = RunFolder(tmp_path)
    run.lock()
    run.unlock()
    assert set(names(run)) == mine | {"LOCK"}
    assert all((tmp_path / name / "file").exists() for name in mine)


def test_a_link_in_the_folder_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    for step in (1, 2):
        put(run, step)
    moved = tmp_path / "other-disk"
    (run.folder / name_of(1)).rename(moved)
    (run.folder / name_of(1)).symlink_to(moved)
    put(run, 3, keep=2)
    assert names(run) == [LATEST, name_of(2), name_of(3)]
    assert (moved / STATE).exists()


def test_the_last_few_are_those_of_most_steps_whatever_the_clock_says(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (10, 20, 30):
        put(run, step)
        os.utime(tmp_path / name_of(step) / STATE, (100 - step, 100 - step))
    put(run, 40)
    assert names(run) == [LATEST, *map(name_of, (20, 30, 40))]


def test_a_run_that_went_back_drops_the_steps_that_it_has_left(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (10, 20, 30):
        put(run, step)
    (tmp_path / LATEST).write_text(name_of(10))
    assert run.newest() == name_of(10)
    put(run, 15)
    put(run, 18)
    assert names(run) == [LATEST, *map(name_of, (10, 15, 18))]


@pytest.mark.parametrize("bit", range(8))
def test_a_latest_with_a_changed_bit_is_as_none(tmp_path: Path, bit: int) -> None:
    run = RunFolder(tmp_path)
    for step in (10, 20):
        put(run, step)
    text = bytearray((tmp_path / LATEST).read_bytes())
    text[3] ^= 1 << bit
    (tmp_path / LATEST).write_bytes(text)
    assert run.newest() == name_of(20)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    put(run, 10)
    (tmp_path / LATEST).unlink()
    (tmp_path / name_of(20)).mkdir()
    for path in (tmp_path / LATEST, tmp_path / name_of(20) / STATE):
        os.mkfifo(path)
    assert run.newest() == name_of(10)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "FIFO", "file"])
def test_a_lock_that_shoal_did_not_make_is_left_alone(tmp_path: Path, kind: str) -> None:
    lock, other = tmp_path / "run" / "LOCK", tmp_path / "thesis.txt"
    lock.parent.mkdir()
    other.write_text("mine")
    if kind == "link":
        lock.symlink_to(other)
    elif kind == "FIFO":
        os.mkfifo(lock)
    else:
        other.rename(lock)
        other = lock
    with pytest.raises(UsageError, match=r"cannot be written there|another file where"):
        RunFolder(lock.parent).lock()
    assert other.read_text() == "mine"


def test_a_folder_that_was_removed_is_locked_again(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    run.lock()
    shutil.rmtree(run.folder)
    run.lock_again()
    with pytest.raises(UsageError, match="another job"):
        other.lock()
    shutil.rmtree(run.folder)
    other.lock()
    for _ in range(2):  # also a second time
        with pytest.raises(UsageError, match="another job"):
            run.lock_again()
    other.unlock()
    run.unlock()


def test_a_lock_of_an_earlier_crew_of_the_same_job_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be(own: tuple[str, int] | None) -> None:
        monkeypatch.setattr("shoal.checkpoint.run.crew", lambda: own)

    be(("job", 3))
    stopped, later = RunFolder(tmp_path), RunFolder(tmp_path)
    stopped.lock()
    for own in (None, ("other", 4), ("job", 3), ("job", 2)):
        be(own)
        with pytest.raises(UsageError, match="another job"):
            later.lock()
    be(("job", 4))
    later.lock()
    be(("job", 3))
    with pytest.raises(UsageError, match=r"another job(.|\n)*of job job crew 4"):
        stopped.lock_again()
    be(("job", 4))
    later.lock_again()
    later.unlock()
    stopped.unlock()
