"""Going on from a checkpoint where ranks are processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.launcher import Job
from shoal.front.session_start import using
from shoal_tools.launch.local import Local

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

# Trains two epochs of four steps, with dropout, and saves behind the third step. Each rank draws
# random numbers of its own, and says at its end what it drew and what its parameters are.
TRAIN = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

staleness = int(os.environ["AHEAD"])
with_servers = {"servers": ("server",)} if staleness else {}
world = shoal.init()
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0, **with_servers)
torch.manual_seed(world.rank)
data = TensorDataset(torch.arange(32 * 6.0).view(32, 6).sin(), torch.arange(32) % 3)
loader = shoal.shard(DataLoader(data, 8, shuffle=True), batch="global")
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())
sample = data[:8][0].double(), data[:8][1]
objects = {"model": model, "optimizer": optimizer, "loader": loader}
with shoal.Checkpoints(sys.argv[1], every_s=1e6, keep=9, **objects) as checkpoints:
    checkpoints.resume()
    print("rank", world.rank, "begins at step", checkpoints.steps, flush=True)
    pins = None if staleness else {"*": "replicate:direct"}
    shoal.parallelize(model, loss_fn, optimizer, sample=sample, pins=pins, staleness=staleness)
    for _ in range(loader.epoch, 2):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x.double()), y).backward()
            optimizer.step()
            checkpoints.step()
            if checkpoints.steps == 3:
                checkpoints.save()
    if staleness:
        checkpoints.save()
drawn = torch.rand(()).item().hex()
digest = sum(parameter.sum().item() for parameter in model.parameters()).hex()
print("rank", world.rank, "ends with", drawn, digest, flush=True)
"""


def said(folder: Path, words: str, capfd: pytest.CaptureFixture[str], ahead: int = 0) -> list[str]:
    """What ranks say at their beginning or end, in order of ranks."""
    variables = {"AHEAD": str(ahead), **({"SHOAL_SERVERS": "1"} if ahead else {})}
    job = Job((sys.executable, "-c", TRAIN, str(folder)), 3 if ahead else 2, variables)
    result, printed = Local().launch(job), capfd.readouterr()
    assert set(result.exit_codes) == {0}, printed.err
    return sorted(re.findall(rf"rank \d {words} .*", printed.out))


def test_dropout_goes_on_with_each_ranks_own_random_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = said(tmp_path, "ends with", capfd)
    assert len(whole) == len(set(whole)) == 2, "ranks draw other numbers"
    begun = said(tmp_path, "(?:begins at|ends with)", capfd)
    assert begun[0] == "rank 0 begins at step 3" and begun[2] == "rank 1 begins at step 3"
    assert begun[1::2] == whole


def test_workers_that_run_ahead_go_on_from_one_moment(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said(tmp_path, "ends", capfd, ahead=2)
    assert said(tmp_path, "begins", capfd, ahead=2) == [
        f"rank {rank} begins at step 8" for rank in range(2)
    ]
    for steps in (3, 8):
        with using(ThreadComm()):
            layers = torch.nn.Linear(6, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3)
            model = torch.nn.Sequential(*layers).double()
            optimizer = torch.optim.AdamW(model.parameters())
            shoal.load(tmp_path / f"step-{steps:08d}", model=model, optimizer=optimizer)
        made = [optimizer.state[parameter]["step"].item() for parameter in model.parameters()]
        assert set(made) == {steps}
