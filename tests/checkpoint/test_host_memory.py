"""The folder of a run in a host's memory: whose it is, and who removes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.checkpoint import host_memory
from shoal.checkpoint.host_memory import HostMemory
from shoal.checkpoint.run import RunFolder
from shoal.core.errors import UsageError

pytestmark = pytest.mark.quick
RUN = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_TRIES", 2)


def opened(root: Path, address: Path, host: str = "a") -> HostMemory:
    memory = HostMemory(root, str(address), host)
    memory.lock()
    return memory


def test_each_run_and_host_has_a_folder_of_its_own(tmp_path: Path) -> None:
    one, other, third = (
        opened(tmp_path, tmp_path / run, host) for run, host in (("r", "a"), ("r", "b"), ("s", "a"))
    )
    assert len({memory.folder for memory in (one, other, third)}) == 3
    assert one.folder.stat().st_mode & 0o777 == 0o700
    for memory in (one, other, third):
        memory.unlock(ended=True)
    assert not [*tmp_path.iterdir()]


def test_two_jobs_do_not_share_one(tmp_path: Path) -> None:
    first = opened(tmp_path, tmp_path / "run")
    with pytest.raises(UsageError, match="another job keeps its snapshots") as caught:
        opened(tmp_path, tmp_path / "run")
    assert str(os.getpid()) in str(caught.value)
    first.unlock(ended=False)
    opened(tmp_path, tmp_path / "run").unlock(ended=True)


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path, str(tmp_path / "run"), "a")
    memory.folder.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="cannot be kept in this host's memory"):
        memory.lock()
    missing = HostMemory(tmp_path / "missing", str(tmp_path / "run"), "a")
    with pytest.raises(UsageError, match=r"FileNotFoundError[\s\S]*SHOAL_HOST_MEMORY"):
        missing.lock()


def test_what_a_dead_job_leaves_goes_once_its_run_is_gone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.write_id(RUN)
    memory = tmp_path / "memory"
    memory.mkdir()
    dead = opened(memory, run.folder)
    dead.note_run(RUN, on_disk=True)
    finder = opened(memory, tmp_path / "other")
    assert finder.remove_leftovers() == [], "a living job"
    dead.unlock(ended=False)
    assert finder.remove_leftovers() == [], "it may be started again"
    run.write_id("f" * 32)
    assert finder.remove_leftovers() == [dead.folder] and not dead.folder.exists()
    finder.unlock(ended=True)


def test_what_a_dead_job_leaves_goes_after_an_hour(tmp_path: Path) -> None:
    dead = opened(tmp_path, tmp_path / "run")
    dead.note_run(RUN, on_disk=False)  # another host has the checkpoints
    dead.unlock(ended=False)
    finder = opened(tmp_path, tmp_path / "other")
    assert finder.remove_leftovers() == []
    for path in (dead.folder, *dead.folder.rglob("*")):
        os.utime(path, (0, 0))
    assert finder.remove_leftovers() == [dead.folder]
    finder.unlock(ended=True)
