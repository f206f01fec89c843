"""Are a slow host and a slow link named, rightly, and nobody else? In the lab, one case a run.

    sudo .venv/bin/python benchmarks/stragglers.py --case busy|link|quiet [--seconds 60] [--hosts 3]

    busy    in the middle, four processes compute without end on the core of host h1
    link    in the middle, the link of host h1 falls to a tenth, both ways
    quiet   nothing happens: any name is a false one

Each host has one rank, and a core of its own as far as there are cores. Printed are the lines that
Shoal logs. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.contracts.launcher import Job
from shoal_tools.launch.lab import Lab
from shoal_tools.testing.planned_faults import Victim, strike

_RATE = "200mbit"
_WIDTH, _ROWS = 384, 256
_STRUCK = "h1"


def train(case: str, seconds: float) -> None:
    """One rank; all train until rank 0 says that it is enough."""
    world = shoal.init()
    cores = sorted(os.sched_getaffinity(0))
    core = cores[world.rank % len(cores)]
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(6)]
    model, loss_fn = nn.Sequential(*blocks, nn.Linear(_WIDTH, 8)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    generator = torch.Generator().manual_seed(world.rank)
    x, y = torch.randn(_ROWS, _WIDTH, generator=generator), torch.arange(_ROWS) % 8
    shoal.parallelize(model, loss_fn, optimizer, sample=(x, y), pins={"*": "replicate"})
    began_s, steps, is_struck = time.monotonic(), 0, world.host != _STRUCK
    burners: list[subprocess.Popen[bytes]] = []
    while shoal.mean(time.monotonic() - began_s) < seconds:
        for _ in range(10):
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        steps += 10
        if time.monotonic() - began_s > seconds / 3 and not is_struck:
            is_struck = True
            if case == "link":
                strike("link at a tenth", Victim())
            elif case == "busy":
                endless = (sys.executable, "-c", "while True: pass")
                burners = [subprocess.Popen(endless) for _ in range(4)]  # on the same core
    for burner in burners:
        burner.terminate()
    if world.is_main:
        print(f"{steps} steps in {time.monotonic() - began_s:.0f} s")


def main() -> None:
    """Run one case, in a lab of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=("busy", "link", "quiet"), default="quiet")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help="be a rank of it")
    asked = parser.parse_args()
    if asked.rank:
        train(asked.case, asked.seconds)
        return
    me = (sys.executable, str(Path(__file__).resolve()), "--rank", "--case", asked.case)
    job = Job((*me, "--seconds", str(asked.seconds)), asked.hosts)
    result = Lab(hosts=asked.hosts, rate=_RATE).launch(job)
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()
