"""A run's folder: the newest complete checkpoint, the last few, and one job at a time."""

from __future__ import annotations

import os
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
    with pytest.raises(UsageError, match="cannot be written there"):
        RunFolder(tmp_path / "file" / "run").lock()
