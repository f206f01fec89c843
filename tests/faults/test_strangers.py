"""A stranger who reaches every port: nothing of his is run, and what he writes ends nothing.

The short forms are in the quick set. The figures of the long ones are in docs/lab/trust.md.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from strangers import Stranger

from shoal.contracts.launcher import Job, Launcher, Result
from shoal_tools.launch.local import Local
from shoal_tools.launch.torchrun import Torchrun

# Trains; each rank tells which classes any pickle has named in it meanwhile, and its parameters.
# Rank LATE comes a second behind the others, and tells them late how it is reached, so that their
# ports stay open for longer. FAULTS strike in the STEPS.
TRAIN = """
import logging, os, sys, time
import torch
from torch import nn
import shoal
from shoal_tools.testing.planned_faults import Faults
from shoal.comm.signed_store import SignedStore
from shoal.core.facts import Link
from shoal.session.session import current

def hear(event, about):
    if event == "pickle.find_class":
        print("a pickle names", about, flush=True)
sys.addaudithook(hear)
logging.getLogger("shoal").setLevel(logging.ERROR)
if os.environ.get("OPEN"):
    os.environ.pop("SHOAL_TOKEN", None)
torch.manual_seed(0)
if os.environ["RANK"] == os.environ.get("LATE"):
    tell = SignedStore.set
    def tell_late(*about):
        time.sleep(0.3)
        tell(*about)
    SignedStore.set = tell_late
    time.sleep(1.0)
began = time.monotonic()
world = shoal.init(start_timeout_s=60)
joined_s = time.monotonic() - began
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(world.rank)
def batch():
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
shoal.parallelize(model, loss_fn, optimizer, sample=batch(), strategies=["replicate", "sliced"])
faults = Faults(os.environ.get("FAULTS", ""), world.rank)
for step in range(int(os.environ["STEPS"])):
    faults.at(step, "forward")
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
digest = sum(parameter.double().sum().item() for parameter in model.parameters()).hex()
print(f"rank {world.rank}: joined in {joined_s:.2f} s, digest {digest}", flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What a job has come to."""

    result: Result
    printed: str
    complained: str

    @property
    def digests(self) -> list[str]:
        """A digest of each rank's parameters, of the ranks that ended well."""
        return re.findall(r"digest (\S+)", self.printed)


def train(
    capfd: pytest.CaptureFixture[str], ranks: int, launcher: Launcher | None = None, **settings: str
) -> Ended:
    settings = {"STEPS": "20", "OMP_NUM_THREADS": "1", **settings}
    result = (launcher or Local()).launch(Job((sys.executable, "-c", TRAIN), ranks, settings))
    printed = capfd.readouterr()
    print(printed.out, printed.err)
    return Ended(result, printed.out, printed.err)


@pytest.fixture
def low_limit() -> Iterator[None]:
    """The usual limit of open files, for this process and those that it starts."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def check_unharmed(ended: Ended, ranks: int, stranger: Stranger) -> None:
    """The ranks have trained, read no pickle, and agree."""
    assert ended.result.exit_codes == (0,) * ranks, ended.complained
    assert len(ended.digests) == ranks and len(set(ended.digests)) == 1
    check_nothing_ran(ended, stranger)


def check_nothing_ran(ended: Ended, stranger: Stranger) -> None:
    """No rank has read a pickle, and no other process has run one of the stranger's."""
    assert "a pickle names" not in ended.printed
    assert not stranger.mark.exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_stranger_at_every_port_neither_runs_nor_ends_anything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Stranger(tmp_path / "mark", values=300, connections=300) as stranger:
        ended = train(capfd, 2, LATE="1")
    check_unharmed(ended, 2, stranger)
    assert len(stranger.written) >= 10 and max(stranger.written.values()) == 300
    assert len(stranger.greeted) >= 2 and sum(stranger.greeted.values()) > 20
    assert max(stranger.idle.values()) == 300


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [Local(), Torchrun()], ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("open_", [False, True], ids=["token", "no token"])
def test_pickles_at_every_port_and_moment_are_not_run(
    launcher: Launcher, open_: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if open_ and launcher.name == "torchrun":
        pytest.skip("he finds no key to write to there, so nothing would be tried")
    token = "" if open_ else None
    with Stranger(tmp_path / "mark", values=10_000, token=token) as stranger:
        ended = train(capfd, 3, launcher, LATE="2", **({"OPEN": "1"} if open_ else {}))
    if open_:  # he may speak for a rank, and end the job before ranks have ports
        check_nothing_ran(ended, stranger)
    else:
        check_unharmed(ended, 3, stranger)
        assert len(stranger.greeted) >= 2
    assert len(stranger.written) >= 5
    print(sum(stranger.written.values()), "values,", sum(stranger.greeted.values()), "greetings")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_bad_values_in_each_key_end_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Stranger(tmp_path / "mark", values=10_000) as stranger:
        ended = train(capfd, 3, STEPS="1200")
    check_unharmed(ended, 3, stranger)
    assert set(stranger.written.values()) == {10_000}, stranger.written
    print(len(stranger.written), "keys")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_bad_values_in_each_key_hide_no_lost_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Stranger(tmp_path / "mark", values=10_000) as stranger:
        ended = train(capfd, 3, FAULTS="rank 1, step 6, forward, kill")
    died = re.search(r"fault at ([\d.]+)", ended.printed)
    assert died is not None and time.time() - float(died[1]) < 15
    who = f"rank 1 (host {socket.gethostname()})"
    assert ended.result.first_failure == 1
    assert ended.complained.count(f"a peer was lost: {who} gives no sign of life") == 2
    said = [line for line in ended.complained.splitlines() if line.startswith("shoal: ")]
    assert said[-1].startswith(f"shoal: {who} gives no sign of life")
    check_nothing_ran(ended, stranger)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_thousand_idle_connections_keep_no_rank_out(
    low_limit: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Stranger(tmp_path / "mark", connections=5000) as stranger:
        ended = train(capfd, 2, LATE="1", STEPS="200")
    check_unharmed(ended, 2, stranger)
    assert max(stranger.idle.values()) == 5000
    print(dict(stranger.idle))


HELD = """
import os, resource, sys, time
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
import shoal
shoal.init(start_timeout_s=60)
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 5000 or hard <= 5000
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_holds_the_store_listens_where_its_address_says_and_raises_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment = {**os.environ, **meeting, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen((sys.executable, "-c", HELD), env={**environment, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=110) for rank in ranks] == [0, 0]


def test_launchers_listen_on_the_loopback_only(tmp_path: Path) -> None:
    """Not on other interfaces, where other hosts would reach them."""
    code = "import socket, sys, os; " + (
        "port = int(os.environ['MASTER_PORT']); "
        "own = socket.create_connection(('127.0.0.1', port)); "
        "wide = socket.socket(); "
        "sys.exit(wide.connect_ex(('127.0.0.2', port)) == 0)"
    )
    assert Local().launch(Job((sys.executable, "-c", code), 2)).exit_codes == (0, 0)
