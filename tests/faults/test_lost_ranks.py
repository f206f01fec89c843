"""Ranks that are lost, as data: the others end soon, each naming the rank, and nothing is left
running.

Most run on threads. Real processes show what only they can: connections that break, a process that
is stopped, exits.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.launcher import Job, Launcher
from shoal.core.errors import DeadlinePassed, PeerLost
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local
from shoal_tools.launch.namespaces import NAMES
from shoal_tools.launch.torchrun import Torchrun
from shoal_tools.testing.planned_faults import Drop, Fault, FaultyComm, Kill, Killed, NetworkFault

# on a loaded machine: about 3 to tell who is lost or what passed, 1 for PyTorch to end
_SOON_S = 10.0
_LAUNCHER_S = 4.0  # to end a rank that does not end by itself

needs_lab = pytest.mark.skipif(
    Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}"
)

# Trains a tiny model, in which FAULTS strike; MORE is the rank that does one backward more.
# No links are measured, to be quick.
TRAIN = """
import logging, os, time
import torch
from torch import nn
import shoal
from shoal.comm import heartbeat
from shoal_tools.testing.planned_faults import Faults
from shoal.core.facts import Link
from shoal.session.session import current

heartbeat._SILENT_S = 2.0
logging.getLogger("shoal").setLevel(logging.WARNING)  # only what is wrong is to be printed
world = shoal.init(timeout_s=float(os.environ["TIMEOUT_S"]), start_timeout_s=60)
assert shoal.init() == world
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
generator, device = torch.Generator().manual_seed(world.rank), os.environ["SHOAL_TEST_DEVICE"]
def batch():
    x, y = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
    return x.to(device), y.to(device)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
faults = Faults(os.environ["FAULTS"], world.rank)
faults.at(0, "set-up")
shoal.parallelize(model, loss_fn, optimizer, sample=batch(), strategies=["replicate"])
for step in range(8):
    x, y = batch()
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    faults.at(step, "end")
if os.environ["MORE"] == str(world.rank):
    print("fault at", time.time(), flush=True)
    loss_fn(model(batch()[0]), batch()[1]).backward()
elif os.environ["MORE"]:
    time.sleep(60)
"""


@dataclass(frozen=True)
class Case:
    """What befalls one rank of a job, and what is said of it on how many ranks."""

    launcher: str
    fault: Fault | None
    said: tuple[str, ...]
    exit_codes: tuple[int, ...]
    heard_on: int
    more: str = ""  # the rank that does one backward more
    ends: bool = True  # whether all ranks end without the launcher's doing
    timeout_s: float = 60.0

    def __str__(self) -> str:
        fault = "one backward more" if self.fault is None else self.fault.kind
        return f"{fault}, {self.launcher}"


def late(kind: str, rank: int = 1) -> Fault:
    return Fault(rank, 5, "end", kind)


CASES = (
    Case(
        "local",
        late("exception"),
        ("a peer was lost: rank 1 (host {host}) failed: Planted: rank 1, step 5, end, exception",),
        (1, 1),
        1,
    ),
    Case(
        "local",
        late("kill"),
        ("a peer was lost: rank 1 (host {host}) gives no sign of life",),
        (1, 137, 1),
        2,
    ),
    Case(
        "local",
        late("exit"),
        ("a peer was lost: rank 1 (host {host}) has ended its program, last at:",),
        (1, 0),
        1,
    ),
    Case(
        "local",
        Fault(1, 0, "set-up", "stop"),
        ("a peer was lost: rank 1 (host {host}) gives no sign of life",),
        (1, 137),
        1,
        ends=False,
    ),
    Case(
        "local",
        None,
        (
            "]: shoal: an exchange did not end within 2 s",
            "absent: rank 1 (last at: after backward 7)",
        ),
        (1, 143),
        1,
        more="0",
        ends=False,
        timeout_s=2.0,
    ),
    Case(
        "by hand",
        late("kill", rank=0),
        ("rank 0 (host {host}), which held the store, is gone",),
        (137, 1, 1),
        2,
    ),
    # it ends the others before they can say anything, and names the rank
    Case("torchrun", late("kill"), (), (143, 137), 0),
    Case(
        "lab",
        late("kill"),
        ("a peer was lost: rank 1 (host h1) gives no sign of life",),
        (1, 137),
        1,
    ),
    Case(
        "lab",
        late("link down"),
        ("a peer was lost: rank 1 (host h1) gives no sign of life",),
        (1, 1),
        1,
    ),
)


def launched(case: Case) -> tuple[int, ...]:
    """Run the case; the ranks' exit codes."""
    variables = {
        "FAULTS": str(case.fault or ""),
        "MORE": case.more,
        "TIMEOUT_S": str(case.timeout_s),
        "SHOAL_TEST_DEVICE": os.environ.get("SHOAL_TEST_DEVICE", "cpu"),
        "SHOAL_TEST": str(os.getpid()),
    }
    job = Job(
        (sys.executable, "-c", TRAIN),
        len(case.exit_codes),
        variables,
        grace_s=15.0 if case.ends else 0.5,
    )
    if case.launcher == "by hand":
        return by_hand(job)
    launchers: dict[str, Launcher] = {
        "local": Local(),
        "torchrun": Torchrun(),
        "lab": Lab(hosts=job.ranks, rate="none"),
    }
    return launchers[case.launcher].launch(job).exit_codes


def by_hand(job: Job) -> tuple[int, ...]:
    """Ranks with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and no launcher: rank 0 holds
    the store.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": str(job.ranks),
        }
    shared = {
        **os.environ,
        **job.environment,
        **meeting,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(job.command, env={**shared, "RANK": str(rank)})
        for rank in range(job.ranks)
    ]
    codes = [rank.wait(timeout=60) for rank in ranks]
    return tuple(code if code >= 0 else 128 - code for code in codes)


def left_running() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SHOAL_TEST={os.getpid()}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=str(case),
            marks=[
                *([pytest.mark.lab, needs_lab] if case.launcher == "lab" else []),
                *([pytest.mark.slow] if case.launcher != "local" else []),
            ],
        )
        for case in CASES
    ],
)
def test_the_others_end_soon_with_an_error_that_names_the_rank(
    case: Case, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = launched(case)
    ended = time.time()
    printed = capfd.readouterr()
    assert codes == case.exit_codes
    fault_at = re.search(r"fault at ([\d.]+)", printed.out)
    assert fault_at is not None
    assert ended - float(fault_at[1]) < _SOON_S + (0 if case.ends else _LAUNCHER_S)
    for words in case.said:
        assert printed.err.count(words.format(host=socket.gethostname())) == case.heard_on
    if case.launcher in ("local", "lab"):  # these say last what befell the job
        what = case.said[0].split(": ", 1)[1].removeprefix("shoal: ")
        what = what.format(host=socket.gethostname())
        assert printed.err.splitlines()[-1].startswith(f"shoal: {what}")
    assert "terminate called" not in printed.err
    assert left_running() == []
    assert [path.name for path in NAMES.glob(f"shoal-{os.getpid()}-*")] == []


@pytest.mark.processes
def test_an_ordinary_end_is_silent_where_rank_0_holds_the_store(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launched(Case("by hand", None, (), (0, 0), 0)) == (0, 0)
    assert capfd.readouterr() == ("", "")


def train(comm: ThreadComm, faults: Sequence[NetworkFault], more: int = 0) -> None:
    """Eight steps of a tiny model on every rank, and `more` backwards on rank 0."""
    with using(FaultyComm(comm, faults)) as session:
        hosts = tuple(str(rank) for rank in range(comm.size))
        session.cluster = Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)
        generator = torch.Generator().manual_seed(comm.rank)
        batches = [
            (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(9)
        ]
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
        pins = {"0": "replicate:direct", "2": "factor"}
        shoal.parallelize(model, loss_fn, optimizer, sample=batches[0], pins=pins)
        for x, y in batches[: 8 + (more if comm.rank == 0 else 0)]:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("rank", [0, 1, 2])
# operations of that rank on all its channels: the 2nd step, … the 8th
@pytest.mark.parametrize("at", [5, 30, 61])
def test_a_rank_that_is_killed_among_threads_is_named_by_the_others(rank: int, at: int) -> None:
    heard: dict[int, Exception] = {}

    def work(comm: ThreadComm) -> None:
        try:
            train(comm, [Kill(rank, at)])
        except Exception as error:
            heard[comm.rank] = error
            raise

    with pytest.raises(Killed):
        run(3, work, timeout_s=20)
    others = [error for other, error in heard.items() if other != rank]
    assert [type(error) for error in others] == [PeerLost, PeerLost]
    assert [error.rank for error in others if isinstance(error, PeerLost)] == [rank, rank]


def test_a_rank_whose_messages_are_lost_is_a_deadline() -> None:
    began = time.monotonic()
    # rank 0 waits, so rank 1 does
    with pytest.raises(DeadlinePassed, match=r"rank \d sent nothing to rank \d"):
        run(2, lambda comm: train(comm, [Drop(rank=1, at=9)]), timeout_s=1.0)
    assert time.monotonic() - began < 10


def test_one_backward_more_on_one_rank_is_a_deadline() -> None:
    with pytest.raises(DeadlinePassed, match=r"step 8, .*rank 0") as error:
        run(3, lambda comm: train(comm, [], more=1), timeout_s=1.0)
    assert error.value.rank in (1, 2)


# Trains over one server, which has a table and slices, or one tail host, either of which rank 0
# kills at step 3.
SERVED = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

where = Path(os.environ["PID_FILE"])
if os.environ["RANK"] == os.environ["DIES"]:
    where.write_text(str(os.getpid()))
world = shoal.init(timeout_s=60.0)
third = {os.environ["KIND"]: ("c",)}
current().cluster = shoal.Cluster(shoal.Topology(("a", "b")), Link(1e-4, 1e8), 1.0, **third)
pins = {"servers": {"0": "server_rows", "2": "server"}, "tail": {"0": "replicate", "2": "stage"}}
torch.manual_seed(world.rank)
x, y = torch.randint(50, (4,)), torch.randint(0, 3, (4,))
model = nn.Sequential(nn.Embedding(50, 8), nn.ReLU(), nn.Linear(8, 3))
loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
staleness = {"none": None}.get(os.environ["AHEAD"], os.environ["AHEAD"])
staleness = staleness and int(staleness)
pins = pins[os.environ["KIND"]]
shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), pins=pins, staleness=staleness)
for step in range(1000):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    if (step, world.rank) == (3, 0):
        where.with_suffix(".killed").write_text(str(time.monotonic()))
        os.kill(int(where.read_text()), signal.SIGKILL)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "ahead", "dies"),
    [
        pytest.param("servers", "0", 2, marks=pytest.mark.slow),
        ("servers", "2", 2),
        pytest.param("servers", "none", 2, marks=pytest.mark.slow),
        pytest.param("servers", "2", 1, marks=pytest.mark.slow),
        pytest.param("tail", "0", 2, marks=pytest.mark.slow),
    ],
)
def test_a_server_a_tail_host_or_a_worker_of_theirs_that_dies_ends_the_job_with_its_name(
    kind: str, ahead: str, dies: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    variables = {
        "PID_FILE": str(tmp_path / "pid"),
        "KIND": kind,
        f"SHOAL_{kind.upper()}": "1",
        "AHEAD": ahead,
    }
    result = Local().launch(
        Job((sys.executable, "-c", SERVED), 3, {**variables, "DIES": str(dies)})
    )
    took_s = time.monotonic() - float((tmp_path / "pid.killed").read_text())
    assert result.exit_codes == tuple(137 if rank == dies else 1 for rank in range(3))
    said = f"shoal: a peer was lost: rank {dies} (host "
    assert (
        len(re.findall(re.escape(said) + r"\S+\) gives no sign of life", capfd.readouterr().err))
        == 2
    )
    assert took_s < _SOON_S
