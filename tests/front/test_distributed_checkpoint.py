"""`torch.distributed.checkpoint` saves what is parallelised, and loads it on other ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shoal
from shoal.comm.threads import ThreadComm
from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.front.session_start import using
from shoal_tools.launch.local import Local

# Trains, saves and goes on; or loads and goes on. Then leaves its weights.
TRAIN = """
import sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

folder, way = Path(sys.argv[1]), sys.argv[2]
world = shoal.init()
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
model, loss_fn = model.double(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 6, generator=generator).double()
    y = torch.randint(0, 3, (12,), generator=generator)
    return x[world.rank :: world.size], y[world.rank :: world.size]
def train(steps):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
pins = {"0": "sliced:direct", "2": "column", "4": "row"} if world.size > 1 else None
shoal.parallelize(model, loss_fn, optimizer, sample=batch(0), pins=pins)
run = {"run": shoal.Stateful(model=model, optimizer=optimizer)}
options = {"checkpoint_id": folder / "saved", "no_dist": world.size == 1}
if way == "save":
    train(range(3))
    dcp.save(run, **options)
else:
    dcp.load(run, **options)
train(range(3, 6))
weights = model.state_dict()
if world.rank == 0:
    torch.save(weights, folder / f"{way}{world.size}.pt")
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_one_process_saves_and_loads(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    with using(ThreadComm()):
        saved, got = made(), made()
        saved["model"](torch.ones(1, 3)).sum().backward()
        saved["optimizer"].step()
        options = {"checkpoint_id": tmp_path / "saved", "no_dist": True}
        dcp.save({"run": shoal.Stateful(**saved)}, **options)
        dcp.load({"run": shoal.Stateful(**got)}, **options)
    assert torch.equal(saved["model"].weight, got["model"].weight)
    for one, other in zip(saved["model"].parameters(), got["model"].parameters(), strict=True):
        expected, state = saved["optimizer"].state[one], got["optimizer"].state[other]
        assert expected.keys() == state.keys()
        assert all(torch.equal(expected[name], state[name]) for name in expected)


def test_plain_data_are_refused() -> None:
    with pytest.raises(UsageError, match="epoch has no state_dict"):
        shoal.Stateful(epoch=3)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_ranks_save_and_others_load(tmp_path: Path) -> None:
    for way, ranks in (("save", 3), ("load", 2), ("load", 1)):
        command = (sys.executable, "-c", TRAIN, str(tmp_path), way)
        assert Local().launch(Job(command, ranks)).exit_code == 0
    expected = torch.load(tmp_path / "save3.pt")
    for name in ("load2.pt", "load1.pt"):
        for key, tensor in torch.load(tmp_path / name).items():
            assert torch.allclose(tensor, expected[key], rtol=0, atol=1e-10), (name, key)


def test_a_state_of_another_object_changes_nothing() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with using(ThreadComm()):
        state = shoal.Stateful(model=model, optimizer=optimizer).state_dict()
        other = nn.Linear(6, 3)
        before = other.weight.detach().clone()
        for wrong, message in (
            ({**state, "optimizer": b"x"}, "optimizer does not take"),
            ({"model": state["model"]}, "optimizer does not take"),
            (state, "another class"),
        ):
            run = shoal.Stateful(model=other, optimizer=torch.optim.SGD(other.parameters(), 0.1))
            with pytest.raises(UsageError, match=message):
                run.load_state_dict(wrong)
            assert torch.equal(other.weight, before)
