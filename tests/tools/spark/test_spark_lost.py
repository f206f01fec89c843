"""A whole worker of the cluster is killed: who it was is told, nothing hangs, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[3] / "src"
TINY = Path(__file__).parents[2] / "tiny_recipe.py"
SUBMIT = (
    "--driver-memory 512m --conf spark.executor.memory=512m --conf spark.driver.host=127.0.0.1 "
    "--conf spark.ui.enabled=false pyspark-shell"
)
# each rank leaves its process's number, and says where it is
TELL = """
import os, pathlib
if "RANK" in os.environ:
    path = pathlib.Path({folder!r}, "pid" + os.environ["RANK"])
    path.write_text(str(os.getpid()))
"""
FUNCTION = """
import sys
from pyspark.sql import SparkSession
from shoal_tools.spark import run

def train(loader):
    {tell}
    for _ in range(100_000):
        list(loader)

spark = SparkSession.builder.master(sys.argv[1]).getOrCreate()
df = spark.createDataFrame([(float(i),) for i in range(40)], "x double")
run(train, df, num_ranks=2, epochs=100_000, batch_size=4)
"""


def program(*words: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(SOURCE), "PYSPARK_SUBMIT_ARGS": SUBMIT}
    return subprocess.Popen(
        (sys.executable, *words),
        env={**settings, "PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_beneath(worker: subprocess.Popen[bytes], process: subprocess.Popen[str]) -> None:
    """Kill a worker and its executors, as its machine would go."""
    there = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    executors = [pid for pid in there if parent(pid) == worker.pid]
    assert executors and process.poll() is None
    for pid in (worker.pid, *executors):
        os.kill(pid, signal.SIGKILL)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return -1


def await_ranks(folder: Path, num: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while len(list(folder.glob("pid*"))) < num:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def assert_none_left(folder: Path) -> None:
    deadline = time.monotonic() + 60  # executors end with their application
    while left := [path.read_text() for path in folder.glob("pid*") if is_alive(path.read_text())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def is_alive(pid: str) -> bool:
    status = Path("/proc", pid, "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_worker_that_is_killed_is_told_and_nothing_is_left(
    own_cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    url, workers = own_cluster
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()

    recipe = tmp_path / "recipe.py"
    recipe.write_text(TINY.read_text() + TELL.format(folder=str(first)))
    words = ["-m", "shoal", "train", str(recipe), "--launcher", "spark", "--master", url]
    training = program(*words, "--ranks", "3", "--epochs", "1000000")
    await_ranks(first, 3, training)
    kill_beneath(workers[2], training)
    _, said = training.communicate(timeout=240)
    assert training.returncode == 137, said
    assert "nothing more is heard of its executor" in said and "/worker2/" in said
    assert "Traceback" not in said
    assert_none_left(first)

    script = tmp_path / "script.py"
    tell = textwrap.indent(TELL.format(folder=str(second)), "    ").strip()
    script.write_text(FUNCTION.format(tell=tell))
    running = program(str(script), url)
    await_ranks(second, 2, running)
    kill_beneath(workers[1], running)
    _, said = running.communicate(timeout=240)
    assert running.returncode == 1
    assert "WorldError: an executor has left, and none has come in its place" in said, said
    assert "the executor at 127.0.0.1:" in said and "room for 1 tasks, 2 are needed" in said
    assert_none_left(second)
