"""A rank whose program ends right after its last step has sent what the others still wait for."""

from __future__ import annotations

import sys

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.launch.local import Local

TRAIN = """
import sys, threading, time
import torch
from torch import nn
import shoal
from shoal.core.facts import Link
from shoal.session.session import current

world = shoal.init(start_timeout_s=60)
current().cluster = shoal.Cluster(shoal.Topology(("a", "b")), Link(1e-4, 1e8), 1.0)
torch.manual_seed(0)
x = torch.full((2, 2000), 1.0 + world.rank)
def main():
    model = nn.Sequential(nn.Linear(2000, 2000), nn.Linear(2000, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = lambda out, _: out.sum()
    shoal.parallelize(model, total, optimizer, sample=(x, 0), strategies=["sliced"])
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    if world.rank == 0:
        time.sleep(0.5)
        print("changed", bool((model[0].weight != before).all()))
joined = threading.Thread(target=lambda: print("in a thread", shoal.world().size))
joined.start()
joined.join()
main()  # the model is gone before the program ends
"""


FORK = (
    TRAIN[: TRAIN.index("joined =")]
    .replace("time.sleep(0.5)", "fork(model)", 1)
    .replace("    optimizer.step()", "    time.sleep(3.0 * world.rank)\n    optimizer.step()")
    + """
import os
def fork(model):
    child = os.fork()
    if not child:
        try:
            model[0].weight.sum()
        except Exception as error:
            print(type(error).__name__, error)
            sys.stdout.flush()
        sys.exit(3)
    print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
main()
"""
)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_forked_child_waits_for_nothing_that_only_its_parent_brings(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = Local().launch(Job((sys.executable, "-c", FORK), 2))
    captured = capfd.readouterr()
    assert result.exit_code == 0, captured.err
    assert "WorldError this process was forked from a rank" in captured.out
    assert "the child ended with 3" in captured.out
    assert "changed True" in captured.out


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_last_parameters_reach_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    result = Local().launch(Job((sys.executable, "-c", TRAIN), 2))
    captured = capfd.readouterr()
    assert result.exit_code == 0, captured.err
    assert "changed True" in captured.out
    assert captured.out.count("in a thread 2") == 2
