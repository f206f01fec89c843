"""How a command's words become a job, and which launcher gets it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner

from command_line import RECIPE, prepare
from shoal.contracts.launcher import Job, Launcher, Result
from shoal.core import registry
from shoal.core.errors import UsageError, WorldError
from shoal_tools.commands.train import train
from shoal_tools.launch import cluster
from shoal_tools.launch.local import Local
from shoal_tools.launch.processes import check, check_here

pytestmark = pytest.mark.quick
JOBS: list[Job] = []


class Noting(Launcher):
    """Starts nothing, and notes what it was asked."""

    name: ClassVar[str] = "noting"

    def missing(self) -> str | None:
        return None

    def room(self, master: str) -> int:
        return 7 if master == "here" else 1

    def launch(self, job: Job) -> Result:
        JOBS.append(job)
        return Result((0, 3), 1)


def started(monkeypatch: pytest.MonkeyPatch, *words: str) -> Job:
    prepare(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["shoal", "train", RECIPE, *words])
    with registry.registered(Noting):
        ended = CliRunner().invoke(train, [RECIPE, "--launcher", "noting", *words])
    assert ended.exit_code == 3, ended.output
    return JOBS.pop()


def test_a_launcher_by_name_is_given_roles_files_and_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--ranks", "2", "--servers", "1", "--file", "./beside.py", "--checkpoint", "run"]
    for name in ("saved.json", "beside.py"):
        (tmp_path / name).touch()
    job = started(monkeypatch, *words, "--save-plan=plan.json", "--plan=./saved.json")
    assert (job.ranks, job.servers, job.tail, job.master) == (3, 1, 0, "")
    assert job.files == (Path(RECIPE), Path("beside.py"), Path("saved.json"))
    assert all(str(path) in job.command for path in job.files)
    assert job.command[:3] == (sys.executable, "-m", "shoal") and RECIPE in job.command
    assert str(tmp_path / "run") in job.command  # ranks elsewhere are in other folders
    assert str(tmp_path / "plan.json") in job.command


def test_without_a_number_there_are_as_many_ranks_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = started(monkeypatch, "--master", "here", "--tail", "2", "--ranks-per-host", "4")
    assert (job.ranks, job.tail, job.roles) == (7, 2, {"SHOAL_TAIL": "2"})
    assert (job.ranks_per_host, job.hosts) == (4, 2)


def test_a_launcher_that_nobody_has_is_named_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(monkeypatch)
    ended = CliRunner().invoke(train, [RECIPE, "--launcher", "sparc"])
    told = str(ended.exception)
    assert "no launcher called 'sparc'" in told and "did you mean 'spark'?" in told
    assert all(name in told for name in ("local", "torchrun"))


def test_what_a_launcher_lacks_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(monkeypatch)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    ended = CliRunner().invoke(train, [RECIPE, "--launcher", "spark"])
    assert "in a clone of Shoal: pip install -e '.[spark]'" in str(ended.exception)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: name)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    ended = CliRunner().invoke(train, [RECIPE, "--launcher", "spark"])
    assert "no Java: install 17" in str(ended.exception)


def test_launchers_of_one_machine_take_no_master_and_no_hosts() -> None:
    with pytest.raises(UsageError, match="takes no master"):
        Local().launch(Job(("true",), 2, master="spark://h:7077"))
    with pytest.raises(UsageError, match="all ranks on one host"):
        check_here(Job(("true",), 4, ranks_per_host=2))
    check_here(Job(("true",), 4, ranks_per_host=4))
    assert Job(("true",), 5, ranks_per_host=2).hosts == 3
    for wrong in ({"servers": 2}, {"tail": 1, "servers": 1}, {"servers": -1}):
        with pytest.raises(UsageError, match="at least one rank that trains"):
            check(Job(("true",), 2, **wrong))


def test_ranks_of_this_machine_are_told_their_roles(tmp_path: Path) -> None:
    say = f'test "$SHOAL_SERVERS" = 1 -a -z "$SHOAL_TAIL" && touch {tmp_path}/$RANK'
    assert Local().launch(Job(("sh", "-c", say), 2, servers=1)).exit_code == 0
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@pytest.mark.parametrize("master", ["spark://", "spark://host", "spark://host:port", "h:7077"])
def test_what_is_no_master_is_refused(master: str) -> None:
    with pytest.raises(UsageError, match="that is no master"):
        cluster.reach(master)


def test_a_master_that_nobody_is_is_told_at_once() -> None:
    with socket.socket() as held:  # a port at which nobody listens
        held.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(WorldError, match="cannot be reached") as caught:
            cluster.reach(master)
    assert caught.value.where == master and "refused" in caught.value.got
