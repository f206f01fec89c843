"""Processors that round unlike one another: what is said, and that owners keep all ranks alike."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from shoal.contracts.launcher import Job
from shoal.core.facts import Topology
from shoal.core.plan import Choice, Plan
from shoal.front.rounding import warn_of_rounding
from shoal_tools.launch.local import Local

HOSTS = ("a", "b", "b", "c")
ALIKE = ("AVX2 fma",) * 4
UNLIKE = ("AVX2 avx2 fma", "AVX512 avx2 avx512f fma", "AVX512 avx2 avx512f fma", "AVX2 avx2 fma")

# Trains on ranks of which one has plainer instructions; each writes down the digest of its model.
RANK = """
import hashlib, os, sys, warnings
from pathlib import Path
if os.environ["RANK"] == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
import torch
from torch import nn
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

world = shoal.init()
hosts = tuple(str(rank) for rank in range(world.size))
current().cluster = shoal.Cluster(shoal.Topology(hosts), Link(1e-4, 1e8), 1.0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(world.rank)
x, y = torch.randn(16, 64, generator=generator), torch.randn(16, 64, generator=generator)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    shoal.parallelize(model, nn.MSELoss(), optimizer, sample=(x, y), strategies=[sys.argv[2]])
for step in range(20):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
text = hashlib.sha256()
for value in model.state_dict().values():
    text.update(value.numpy().tobytes())
warned = sum("round unlike" in str(warning.message) for warning in said)
Path(sys.argv[1], str(world.rank)).write_text(f"{warned} {text.hexdigest()}")
"""


def plan(*strategies: str) -> Plan:
    choices = tuple(Choice(f"{n}", name) for n, name in enumerate(strategies))
    return Plan(4, "digest", choices, 1 << 20, 3)


def said(topology: Topology, *strategies: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_rounding(topology, plan(*strategies))
    return " ".join(str(warning.message) for warning in caught)


def test_unlike_processors_are_named_by_what_they_do_not_share() -> None:
    text = said(Topology(HOSTS, processors=UNLIKE), "sliced", "replicate", "factor")
    assert "(a, c: AVX2; b: AVX512 avx512f)" in text
    assert "copies of 1, 2 drift apart" in text


@pytest.mark.parametrize(
    ("processors", "strategies"),
    [(ALIKE, ("replicate",)), (UNLIKE, ("sliced", "column")), ((), ("replicate",))],
    ids=["alike", "owners and parts", "unknown"],
)
def test_nothing_is_said_where_nothing_drifts(
    processors: tuple[str, ...], strategies: tuple[str, ...]
) -> None:
    assert said(Topology(HOSTS, processors=processors), *strategies) == ""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="no better instructions here"
)
@pytest.mark.parametrize(("strategy", "alike"), [("replicate", False), ("sliced", True)])
def test_owners_keep_ranks_alike_where_copies_drift(
    strategy: str, alike: bool, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", RANK, str(tmp_path), strategy)
    assert Local().launch(Job(command, 2)).exit_code == 0
    warned, digests = zip(*((tmp_path / f"{r}").read_text().split() for r in (0, 1)), strict=True)
    assert warned == ("0" if alike else "1", "0")
    assert (len(set(digests)) == 1) == alike
