"""Models that are dropped, one after another in one process, as folds and sweeps make them: threads
and file descriptors do not grow, however training ended.
"""

from __future__ import annotations

import sys

import pytest

from shoal.contracts.launcher import Job
from shoal_tools.launch.local import Local

FOLDS = """
import gc, logging, os, threading
import torch
from torch import nn
import shoal

logging.getLogger("shoal").setLevel(logging.ERROR)
torch.set_num_threads(1)
world = shoal.init(timeout_s=60)
x, y = torch.randn(8, 6), torch.arange(8) % 3
loss = nn.CrossEntropyLoss()

class Pruned(Exception):
    pass

def fold(pins, ends):
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    shoal.parallelize(model, loss, optimizer, sample=(x + world.rank, y), pins=pins)
    loss(model(x), y).backward()
    if ends == "between backward and step":
        raise Pruned
    optimizer.step()
    output = model(x)
    if ends == "in forward":
        raise Pruned
    loss(output, y).backward()

def now():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

ENDS = ("", "between backward and step", "in forward", "")
for pins in (
    {"*": "sliced"},
    {"*": "sliced", "2": "column"},
    {"*": "sliced", "0": "factor"},
    {"*": "sliced", "2": "embedding"},  # is refused
):
    seen = []
    for number in range(12):
        try:
            fold(pins, ENDS[number % len(ENDS)])
        except (Pruned, shoal.ShoalError):
            pass
        seen.append(now())
    # what is at work may be one round behind
    assert all(late <= max(early) for early, late in zip(zip(*seen[:6]), seen[-1])), (pins, seen)
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_twelve_models_leave_no_threads_and_no_descriptors() -> None:
    assert Local().launch(Job((sys.executable, "-c", FOLDS), 2)).exit_codes == (0, 0)
