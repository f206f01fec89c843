"""A rank on an executor of Spark, for both ways there: its process, its folder and its end."""

from __future__ import annotations

import importlib
import inspect
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.core.errors import PeerLost
from shoal_tools.launch import executor_rank, task_holder
from shoal_tools.launch.barrier import TaskSeat
from shoal_tools.launch.executor_rank import ExecutorRank, rank_of_task
from shoal_tools.spark import task

pytestmark = [pytest.mark.quick, pytest.mark.processes]

SEAT = TaskSeat(1, "b", "rank 1, executor on host b", {"RANK": "1"})
SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def is_gone(pid: str) -> bool:
    status = Path("/proc", pid.strip(), "status")
    return not status.exists() or "State:\tZ" in status.read_text()


def test_stop_leaves_nothing_of_what_the_rank_has_started(tmp_path: Path) -> None:
    rank = ExecutorRank(SEAT, tmp_path)
    words = ("sh", "-c", "setsid sleep 600 & echo $! $RANK $GIVEN; exec sleep 600")
    process = rank.start(words, {"GIVEN": "yes"}, folder=tmp_path, stderr=None)
    assert process.stdout is not None
    with process.stdout as said:
        pid, *settings = said.readline().decode().split()
    assert settings == ["1", "yes"] and not is_gone(pid)
    rank.stop()
    assert process.returncode == -signal.SIGKILL and is_gone(pid)
    rank.signal(signal.SIGTERM)  # this does nothing, because the number may be another's now
    rank.stop()


def test_a_signal_reaches_the_rank(tmp_path: Path) -> None:
    rank = ExecutorRank(SEAT, tmp_path)
    process = rank.start(("sleep", "600"), {}, **SILENT)
    rank.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    error = rank.error(process.returncode)
    assert isinstance(error, PeerLost)
    assert error.where == SEAT.executor and error.got == "signal SIGTERM"
    assert rank.error(3).got == "exit code 3"


def test_the_rank_of_a_task_ends_with_its_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark = SimpleNamespace(BarrierTaskContext=SimpleNamespace(get=lambda: None))
    monkeypatch.setattr(importlib, "import_module", lambda name: spark)
    monkeypatch.setattr(executor_rank, "seat_of", lambda context: SEAT)
    monkeypatch.setattr(executor_rank, "local_folder", lambda: str(tmp_path))
    with pytest.raises(KeyError), rank_of_task() as rank:
        process = rank.start(("sleep", "600"), {}, **SILENT)
        assert list(tmp_path.iterdir()) == [rank.folder]
        raise KeyError
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_no_other_file_of_the_two_ways_starts_a_process() -> None:
    for way in (task_holder, task):
        source = inspect.getsource(way)
        assert "rank_of_task()" in source
        assert "Popen(" not in source and "seat_of(" not in source
