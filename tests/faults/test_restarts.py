"""Ranks that torchrun starts again, on several hosts: they meet anew, and train on.

The end is bit for bit that of a run in which nothing happened.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from networks import Hosts, Network, up

from shoal.contracts.launcher import Job
from shoal_tools.launch.lab import Lab
from shoal_tools.launch.local import Local

pytestmark = [pytest.mark.processes, pytest.mark.slow]

# Trains with a checkpoint of its own every second step; each fault strikes once.
TRAIN = """
import sys
from pathlib import Path
import torch
from torch import nn
import shoal
from shoal_tools.testing.planned_faults import Faults
from shoal.core.facts import Link
from shoal.session.session import current

folder = Path(sys.argv[1])
world = shoal.init(timeout_s=60, start_timeout_s=90)
faults = Faults(sys.argv[2], world.rank, marks=folder)
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.05)
first, saved = 0, folder / "saved.pt"
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
def batch(step):
    generator = torch.Generator().manual_seed(step * world.size + world.rank)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
pins = {"0": "replicate:direct", "2": "factor", "4": "sliced:direct"}
shoal.parallelize(model, loss_fn, optimizer, sample=batch(0), pins=pins)
print(f"rank {world.rank} starts at {first}", flush=True)
for step in range(first, 12):
    faults.at(step, "forward")
    x, y = batch(step)
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    if step % 2:
        weights, state = model.state_dict(), optimizer.state_dict()
        if world.rank == 0:
            torch.save({"model": weights, "optimizer": state, "step": step + 1}, folder / "new.pt")
            (folder / "new.pt").rename(saved)
"""

RENDEZVOUS = {
    "static": lambda node, port: (
        f"--node-rank={node}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ),
    "c10d": lambda node, port: (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=12",
    ),
}


def trained(folder: Path) -> dict[str, torch.Tensor]:
    saved: dict[str, torch.Tensor] = torch.load(folder / "saved.pt")["model"]
    return saved


def agents(rendezvous: str, restarts: int, command: Sequence[str]) -> list[str]:
    """What two agents of torchrun have printed; both have ended with 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--nnodes=2", "--nproc-per-node=1", f"--max-restarts={restarts}", "--no-python")
    processes = [
        subprocess.Popen(
            (
                *(sys.executable, "-m", "torch.distributed.run", *options),
                *RENDEZVOUS[rendezvous](node, port),
                *command,
            ),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        printed = [process.communicate(timeout=170)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_ranks_that_are_killed_come_again_and_end_as_if_they_had_not_been(
    rendezvous: str, tmp_path: Path
) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    plain.mkdir(), killed.mkdir()
    command = (sys.executable, "-c", TRAIN)
    assert Local().launch(Job((*command, str(plain), ""), 2)).exit_code == 0
    faults = ["rank 0, step 7, forward, kill", "rank 1, step 3, forward, kill"]
    printed = "".join(agents(rendezvous, 3, (*command, str(killed), "; ".join(faults))))
    assert sorted(path.name for path in killed.glob("rank *")) == faults
    for first in (0, 2, 6):
        assert printed.count(f"starts at {first}\n") == 2, printed
    expected = trained(plain)
    assert all(tensor.equal(expected[name]) for name, tensor in trained(killed).items())


@pytest.mark.lab
@pytest.mark.skipif(Lab().missing() is not None, reason=f"no lab here: {Lab().missing()}")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_the_loss_of_rank_0_is_told_with_its_host_though_its_agent_holds_the_store(
    kind: str, tmp_path: Path
) -> None:
    names = (["10.0.0.2 h1"], ["10.0.0.1 h0"])
    agent = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--no-python")
    meeting = ("--master-addr=10.0.0.1", "--master-port=29512")
    fault = f"rank 0, step 5, forward, {kind}"
    command = (sys.executable, "-c", TRAIN, str(tmp_path), fault)
    with up(Hosts((Network("eth0", ("10.0.0.1/24", "10.0.0.2/24")),), names)) as hosts:
        processes = [
            hosts.start(node, (*agent, f"--node-rank={node}", *meeting, *command), {})
            for node in range(2)
        ]
        printed = [process.communicate(timeout=170)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    said = re.findall(r"shoal: (a peer was lost: .*)", printed[1])
    assert said, printed[1]
    if kind == "kill":
        assert said[0].startswith("a peer was lost: rank 0 (host h0) "), said
    else:
        assert f"rank 0 (host h0) failed: Planted: {fault}" in said[0], said
    assert "the launcher, which holds" not in printed[1]
