"""Hosts that do not train: the script's way, and a program of their own."""

from __future__ import annotations

import sys

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.launch.local import Local

TRAIN = """
    import torch
    x, y = torch.ones(2, 8) * (1 + shoal.world().rank), torch.zeros(2, 4)
    model, loss_fn = torch.nn.Linear(8, 4), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), pins={"*": "server"})
    loss_fn(model(x), y).backward()
    optimizer.step()
    print("trained", model.weight.shape)
"""

SCRIPT = f"""
import shoal
try:
    world = shoal.init()
except shoal.Served as served:
    print("served, and would end with", served.code)
    raise
if world.size:
    {TRAIN.strip()}
print("went on")
"""

PROGRAM = f"""
import os
import shoal
if os.environ["RANK"] == "2":
    shoal.serve()
    print("went on")
else:
    shoal.init()
    try:
        shoal.serve()
    except shoal.UsageError as error:
        print("refused:", error.what)
    {TRAIN.strip()}
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_script_ends_on_a_server_behind_its_work(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job((sys.executable, "-c", SCRIPT), 3, {"SHOAL_SERVERS": "1"})
    result, printed = Local().launch(job), capfd.readouterr()
    assert result.exit_codes == (0, 0, 0), printed.err
    assert printed.out.count("served, and would end with 0") == 1
    assert printed.out.count("trained") == printed.out.count("went on") == 2


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_program_that_serves_goes_on_behind_it(capfd: pytest.CaptureFixture[str]) -> None:
    job = Job((sys.executable, "-c", PROGRAM), 3, {"SHOAL_SERVERS": "1"})
    result, printed = Local().launch(job), capfd.readouterr()
    assert result.exit_codes == (0, 0, 0), printed.err
    assert printed.out.count("went on") == 1
    assert printed.out.count("refused: this rank is a worker") == 2
    assert printed.out.count("trained") == 2
