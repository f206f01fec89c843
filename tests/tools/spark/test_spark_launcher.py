"""`--launcher spark` on the executors of a real cluster: what every launcher promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError, WorldError
from shoal_tools.launch.cluster import slots
from shoal_tools.launch.spark import Spark

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900)]

SOURCE = Path(__file__).parents[3] / "src"
SUBMIT = "--driver-memory 512m pyspark-shell"
RECIPE = Path(__file__).parents[2] / "tiny_recipe.py"
# Each rank says where it stands, and leaves a process behind in a session of its own.
PLACE = """
set -u  # an unset variable is an error
: $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $SHOAL_HOST $SHOAL_TOKEN
echo $RANK of $WORLD_SIZE says $GREETING, servers $SHOAL_SERVERS
setsid sh -c 'echo $$ >"$OUT/pid$RANK"; exec sleep 600' &
while test ! -s "$OUT/pid$RANK"; do sleep 0.02; done
"""
# Rank 1 fails first; rank 0 fails when it has seen that.
ONE_LATER = """
test $RANK = 1 && { touch "$OUT/failing"; exit 3; }
while test ! -e "$OUT/failing"; do sleep 0.02; done
sleep 0.5
exit 4
"""
# Of the executor's processes: the rank, setpriv's, Spark's Python worker and its daemon, Java.
KILLS_ITS_EXECUTOR = """
import os, pathlib, signal, sys, time
if os.environ["RANK"] == sys.argv[1]:
    pid = os.getpid()
    while "java" not in os.readlink(f"/proc/{pid}/exe"):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    pathlib.Path(sys.argv[2], "killed").write_text(str(pid))
    os.kill(pid, signal.SIGKILL)
pathlib.Path(sys.argv[2], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def is_alive(pid: str) -> bool:
    status = Path("/proc", pid.strip(), "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def await_slots(spark: Any, num: int) -> None:
    """Until executors have come in the place of those that a test has ended."""
    deadline = time.monotonic() + 240
    while slots(spark) < num:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_ranks_know_their_place_and_leave_nothing(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"GREETING": "hello", "OUT": str(tmp_path)}
    result = Spark().launch(Job(("sh", "-c", PLACE), 3, settings, servers=1))
    assert (result.exit_codes, result.first_failure) == ((0, 0, 0), None)
    said = capfd.readouterr().out.splitlines()
    assert sorted(line for line in said if " says " in line) == [
        f"[rank {rank}] {rank} of 3 says hello, servers 1" for rank in range(3)
    ]
    assert not any(is_alive(path.read_text()) for path in tmp_path.glob("pid*"))


def test_the_first_failure_in_time_is_the_verdict(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = Spark().launch(Job(("sh", "-c", ONE_LATER), 2, {"OUT": str(tmp_path)}))
    assert (result.exit_codes, result.first_failure, result.exit_code) == ((4, 3), 1, 3)
    assert "rank 1, executor on host 127.0.0.1" in capfd.readouterr().err


def test_a_rank_that_dies_takes_the_others_with_it(spark: Any) -> None:
    command = ("sh", "-c", "test $RANK = 1 && kill -9 $$; exec sleep 600")
    result = Spark().launch(Job(command, 2, grace_s=0.2))
    assert (result.exit_codes, result.first_failure) == ((143, 137), 1)


def test_a_recipe_is_sent_along_and_trained(
    spark: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "there" / "recipe.py"
    recipe.parent.mkdir()
    recipe.write_text("from beside import *\n" + RECIPE.read_text())
    beside = tmp_path / "beside.py"
    beside.write_text("NUMBER = 3\n")
    monkeypatch.chdir(tmp_path)
    words = ("-m", "shoal", "train", "there/recipe.py", "--checkpoint", str(tmp_path / "run"))
    job = Job((sys.executable, *words), 2, files=(Path("there/recipe.py"), Path("beside.py")))
    result = Spark().launch(job)
    out = capfd.readouterr()
    assert result.exit_code == 0, out.err
    assert "test accuracy" in out.out and list((tmp_path / "run").iterdir())


def test_bad_input_is_told_before_anything_starts(spark: Any) -> None:
    with pytest.raises(UsageError, match="more ranks than tasks") as many:
        Spark().launch(Job(("true",), 4))
    assert "ranks=4, 3 free" in many.value.got and "ask for 3" in many.value.do
    with pytest.raises(UsageError, match="put ranks on hosts otherwise") as caught:
        Spark().launch(Job(("true",), 2, ranks_per_host=1))
    assert "2 on 127.0.0.1" in caught.value.got
    with pytest.raises(UsageError, match="session of another cluster"):
        Spark().launch(Job(("true",), 2, master="spark://elsewhere:7077"))
    with pytest.raises(UsageError, match="cannot be read"):
        Spark().launch(Job(("true",), 2, files=(Path("/no/such.py"),)))
    assert Spark().room("") == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_an_executor_that_dies_is_named_and_nothing_is_left(
    spark: Any, tmp_path: Path, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    command = (sys.executable, "-c", KILLS_ITS_EXECUTOR, str(rank), str(tmp_path))
    began = time.monotonic()
    result = Spark().launch(Job(command, 3, grace_s=1.0))
    assert time.monotonic() - began < 120
    first = result.first_failure
    assert first is not None and result.exit_code == 137
    said = capfd.readouterr().err
    assert f"rank {first}, executor on host 127.0.0.1, in " in said
    assert "nothing more is heard of its executor" in said
    assert not is_alive((tmp_path / "killed").read_text())
    deadline = time.monotonic() + 30  # the kernel ends them with their parents
    while any(is_alive(path.read_text()) for path in tmp_path.glob("pid*")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    await_slots(spark, 3)  # the cluster goes on


def test_a_command_line_trains_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    """From start to end in a process of its own, with its session; errors end it with 1 or 2."""
    settings = {"PYTHONPATH": str(SOURCE), "PYSPARK_SUBMIT_ARGS": SUBMIT}
    command = [sys.executable, "-m", "shoal", "train", str(RECIPE), "--launcher", "spark"]
    command += ["--master", "local[2]"]
    environment = {**os.environ, **settings}
    done = subprocess.run(
        [*command, "--epochs", "1"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "plan for 2 ranks" in done.stdout and "test accuracy" in done.stdout
    done = subprocess.run(
        [*command, "--ranks", "3"], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 2 and "more ranks than tasks" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_at_the_driver_has_ranks_save_and_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", str(RECIPE), "--launcher", "spark", "--master", "local[2]", "--ranks", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", *words, "--checkpoint", str(run), "--epochs", "100000"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "PYSPARK_SUBMIT_ARGS": SUBMIT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "epoch 2" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=240)
    told = "".join(said) + rest
    assert process.returncode == -signal.SIGTERM, told
    assert "saved, as a signal asked" in told and list(run.glob("*/model.safetensors"))


def test_a_master_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_tools.launch.cluster._own_session", lambda: None)
    with pytest.raises(WorldError, match="cannot be reached"):
        Spark().launch(Job(("true",), 2, master="spark://127.0.0.1:1"))
