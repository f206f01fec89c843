"""Ctrl-C, and the death of a launcher: no process of a job is left, with workers that read data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from free_ports import free_port
from shoal_tools.launch.host_end import marked

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

world = shoal.init()
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
data = TensorDataset(torch.randn(4096, 6), torch.randint(3, (4096,)))
loader = shoal.shard(DataLoader(data, 4, num_workers=1), batch="global")
model, loss_fn = nn.Linear(6, 3), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
objects = {"model": model, "optimizer": optimizer}
with shoal.Checkpoints(sys.argv[1] + "/run", every_s=1.0, in_memory_every=5, **objects) as saved:
    shoal.parallelize(model, loss_fn, optimizer, sample=data[:4])
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        saved.step()
        if step == 3:
            Path(sys.argv[1], f"rank{world.rank}").touch()
        time.sleep(0.05)
"""
SHOAL = (sys.executable, "-m", "shoal", "run", "--hosts", "localhost:2", "--grace", "5")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "1")
LAUNCHERS = {
    "torchrun": (*TORCHRUN, "--nproc-per-node", "2"),
    "shoal run": SHOAL,
    "shoal run, elastic": (*SHOAL, "--nnodes", "1:2"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_nothing_is_left(launcher: str, number: signal.Signals, tmp_path: Path) -> None:
    script, memory = tmp_path / "train.py", tmp_path / "memory"
    script.write_text(TRAIN)
    memory.mkdir()
    own = {"ORPHANS_OF": str(tmp_path), "SHOAL_HOST_MEMORY": str(memory), "OMP_NUM_THREADS": "1"}
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    own_port = ("--master-port", str(free_port()))
    sent = own_port if launcher == "torchrun" else ("--env", "ORPHANS_OF")
    printed = (tmp_path / "printed").open("w")
    process = subprocess.Popen(
        (*LAUNCHERS[launcher], *sent, str(script), str(tmp_path)),
        env={**os.environ, **path, **own},
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
        start_new_session=True,
        cwd=tmp_path,
    )

    def left() -> list[int]:
        return marked(f"ORPHANS_OF={tmp_path}")

    try:
        until_s = time.monotonic() + 120
        while not all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)):
            assert process.poll() is None, (tmp_path / "printed").read_text()
            assert time.monotonic() < until_s, (tmp_path / "printed").read_text()
            time.sleep(0.05)
        assert len(left()) >= 5  # a launcher, two ranks with a worker each
        os.killpg(process.pid, number)  # as the terminal does: to the whole group
        assert process.wait(60) != 0
        until_s = time.monotonic() + (1 if number == signal.SIGINT else 30)
        while left() and time.monotonic() < until_s:
            time.sleep(0.1)
        assert left() == [], subprocess.run(
            ("ps", "-o", "pid,ppid,stat,args", *map(str, left())), capture_output=True
        ).stdout.decode()
    finally:
        printed.close()
        for pid in left():
            os.kill(pid, signal.SIGKILL)
        process.wait()
