"""The end of a model on a host of its own: seconds of a step, also with another checkout.

    sudo .venv/bin/python benchmarks/stage.py [--rate 200mbit] [--other CHECKOUT] [--turns 3]

Two ranks train and one host holds wide layers, in a lab. Steps go with one micro-batch a rank and
with four. With CHECKOUT, the source of another version takes turns with this one: pins say "stage",
which both know. Prints the median step of each turn, and writes results/stage.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal

RANKS, STEPS, ROWS, WIDE = 2, 12, 32, 1024
MICRO_BATCHES = (1, 4)
ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "stage.json"


class Net(nn.Module):
    """A front of narrow layers, and a wide end with most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.end = nn.Sequential(
            nn.Linear(512, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.end(self.front(x))
        return output


def rank(micro_batches: str, file: str) -> None:
    """Train on a rank, and write the seconds of its steps."""
    shoal.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss_fn = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(shoal.world().rank)  # rows of its own
    x, y = torch.randn(ROWS, 256), torch.randint(10, (ROWS,))
    pins = {"front.*": "replicate:direct", "end.*": "stage"}
    model, loss_fn, optimizer = shoal.parallelize(
        model, loss_fn, optimizer, sample=(x, y), pins=pins, micro_batches=int(micro_batches)
    )
    seconds = []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began_s)
    if shoal.world().rank == 0:
        Path(file).write_text(json.dumps(seconds[2:]))


def measured(source: Path, rate: str, micro_batches: int) -> float:
    """Return the median step of one run in a lab."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        lab = ["lab", "--hosts", str(RANKS), "--tail", "1", "--rate", rate, "--"]
        script = [sys.executable, __file__, "--rank", str(micro_batches), str(file)]
        environment = os.environ | {"PYTHONPATH": str(source / "src")}
        command = [sys.executable, "-m", "shoal", *lab, *script]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        return statistics.median(json.loads(file.read_text()))


def main() -> None:
    """Run all in turn, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--other", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    sources = {"this": ROOT} | ({"other": asked.other} if asked.other else {})
    steps: dict[str, list[float]] = {}
    for _ in range(asked.turns):
        for count in MICRO_BATCHES:
            for name, source in sources.items():
                seconds = measured(source, asked.rate, count)
                steps.setdefault(f"{name}, {count} micro-batches", []).append(seconds)
    figures: dict[str, Any] = {"rate": asked.rate, "step_s": steps}
    for name, each in steps.items():
        print(f"{name}: {', '.join(f'{s * 1e3:.1f}' for s in each)} ms a step", flush=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:])
    else:
        main()
