"""`shoal run`: from an empty folder on two hosts to a first step, in two commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from ssh_hosts import SshHosts, missing, ssh_hosts

from shoal.contracts.launcher import Job, Result
from shoal_tools.cli import main
from shoal_tools.commands import run_script
from shoal_tools.elastic.ssh_crews import SshCrews
from shoal_tools.launch.agent import HostCount
from shoal_tools.launch.ssh import Ssh

SCRIPT = """
import sys
import torch
import shoal

world = shoal.init()
torch.manual_seed(world.rank)
model, loss_fn = torch.nn.Linear(8, 4), torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(4, 8), torch.randn(4, 4)
shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))
optimizer.zero_grad()
loss_fn(model(x), y).backward()
optimizer.step()
print("step 1 on rank", world.rank, "of", world.size, "at", world.host, *sys.argv[1:], flush=True)
if sys.argv[1] == "fail" and world.rank == 1:
    sys.exit(7)
shoal.mean(0.0)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path) as found:
        yield found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ssh, Job]]:
    """The launches that a command asks for, and nothing that starts."""
    found: list[tuple[Ssh, Job]] = []

    def launch(self: Ssh, job: Job) -> Result:
        found.append((self, job))
        return Result((0,) * job.ranks, None)

    monkeypatch.setattr(Ssh, "launch", launch)
    return found


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_from_an_empty_folder_to_a_first_step(
    hosts: SshHosts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(Path(run_script.__file__).parents[2]))
    (here / "train.py").write_text(SCRIPT)
    options = ("--chdir", str(hosts.folder), "--ssh", shlex.join(hosts.ssh))
    assert hosts.at(0, f"ls {hosts.folder}") == hosts.at(1, f"ls {hosts.folder}") == ""

    sent = shoal_run("--hosts", "a,b", "--send", *options, "train.py", "well")
    printed = capsys.readouterr()
    assert sent == 0, printed.err
    assert "[a] step 1 on rank 0 of 2 at a well\n" in printed.out
    assert "[b] step 1 on rank 1 of 2 at b well\n" in printed.out
    assert not [line for line in printed.err.splitlines() if line.startswith("[b] shoal: ")]

    assert shoal_run("--hosts", "a,b", *options, "train.py", "fail") == 7
    assert "shoal: rank 1 on b has ended with exit code 7" in capsys.readouterr().err


def shoal_run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["run", *words], prog_name="shoal")
    return int(ended.value.code or 0)


def test_a_script_is_checked_and_its_arguments_are_its_own(
    started: list[tuple[Ssh, Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "1")
    words = ("--hosts", "a,me@b:2", "--env", "MINE", "--env", "X=2", "--grace", "3")
    assert shoal_run(*words, "train.py", "--hosts", "c", "-x") == 0
    ((launcher, job),) = started
    assert job.command == (sys.executable, "train.py", "--hosts", "c", "-x")
    assert (job.ranks, job.master, job.grace_s) == (3, "a:1,me@b:2", 3.0)
    assert job.environment == {"MINE": "1", "X": "2"}
    assert launcher == Ssh(same=("train.py",))
    assert job.files == ()


def test_other_ways_to_run(started: list[tuple[Ssh, Job]], tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "hosts"
    script.touch()
    file.write_text("a slots=2\nb slots=2\n")
    words = ("--hosts-file", str(file), "--nnodes", "2", "--max-restarts", "3")
    where = ("--python", "/py", "--chdir", "/there", "--master-addr", "x", "--master-port", "1")
    assert shoal_run(*words, *where, "--send", "--ssh", "ssh -p 2", str(script)) == 0
    assert shoal_run("--hosts", "a", "-m", "pkg.train", "x") == 0
    (launcher, job), (other, module) = started
    assert (job.files, job.ranks) == ((script,), 4)
    assert launcher == Ssh(*("/py", "/there", (), (), 3, "x", 1, ("ssh", "-p", "2")))
    assert module.command == (sys.executable, "-m", "pkg.train", "x")
    assert (other.modules, other.same) == (("pkg.train",), ())


def test_hosts_may_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[SshCrews, Job]] = []

    def launch(self: SshCrews, job: Job) -> int:
        found.append((self, job))
        return 3

    monkeypatch.setattr(SshCrews, "launch", launch)
    hosts = ("--hosts", "a,b:2,c", "--nnodes", "2:3", "--max-restarts", "1")
    waits = ("--wait-for", "60", "--lost-after", "5")
    assert shoal_run(*hosts, *waits, "train.py", "x") == 3
    ((crews, job),) = found
    same = Ssh(same=("train.py",), restarts=1)
    assert crews == SshCrews(same, HostCount(2, 3, 1), 60.0, 5.0)
    assert job.command[1:] == ("train.py", "x") and job.master == "a:1,b:2,c:1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x.py",), "neither --hosts nor --hosts-file"),
        (("--hosts", "a", "--hosts-file", "f", "x.py"), "both --hosts and --hosts-file"),
        (("--hosts", "a,b", "--nnodes", "3", "x.py"), "--nnodes asks for other hosts"),
        (("--hosts", "a", "--send", "no.py"), "so it cannot be sent"),
        (("--hosts", "a", "--env", "NOT_SET_HERE", "x.py"), "--env NOT_SET_HERE=VALUE"),
        (
            (
                "--hosts",
                "a",
            ),
            "Missing argument",
        ),
        (("--hosts", "a", "--ssh", "'", "x.py"), "--ssh"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    words: tuple[str, ...], said: str, started: list[tuple[Ssh, Job]]
) -> None:
    result = CliRunner().invoke(main, ["run", *words])
    assert result.exit_code == 2 and said in result.output and not started
