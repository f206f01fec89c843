"""ResNet-50 with `memory="low"` against the same plan without: seconds a step, and what a rank
holds.

    sudo .venv/bin/python benchmarks/low_memory.py [RATE]      four hosts at 1gbit, about three
                                                               minutes

Every layer is sliced; the two models take turns in one job (A B A B). A round's figure is the
median step of the slowest rank; memory is that of the rank with the most. Figures in
results/low-memory.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.contracts.launcher import Job
from shoal.core.buckets import MEMORY
from shoal.front.recipe import load
from shoal.session.session import current
from shoal_tools.launch.lab import Lab

HERE = Path(__file__).parent
RECIPE, RESULTS = HERE.parent / "examples" / "resnet50.py", HERE / "results" / "low-memory.json"
RANKS, ROUNDS, STEPS = 4, 7, 3


def train() -> None:
    """What each rank runs; rank 0 prints and writes the figures."""
    world = shoal.init()
    everyone = current().comm
    recipe = load(RECIPE)
    torch.manual_seed(world.rank)
    x, y = torch.randn(4, 3, 128, 128), torch.randint(1000, (4,))
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
    for memory in MEMORY:
        torch.manual_seed(0)
        model = recipe.model()
        optimizer = recipe.optimizer(model.parameters())
        shoal.parallelize(
            model, recipe.loss(), optimizer, sample=(x, y), pins={"*": "sliced"}, memory=memory
        )
        trained[memory] = model, optimizer
        seconds(model, optimizer, x, y)  # warm
    rounds: dict[str, list[float]] = {memory: [] for memory in trained}
    for _ in range(ROUNDS):
        for memory, each in trained.items():
            everyone.gather_objects(None, "set-up")
            rounds[memory].append(max(everyone.gather_objects(seconds(*each, x, y), "set-up")))
    held = {
        memory: everyone.gather_objects(shoal.memory(model), "set-up")
        for memory, (model, _) in trained.items()
    }
    if world.rank == 0:
        ratios = [low / fast for fast, low in zip(*rounds.values(), strict=True)]
        figures = {
            memory: {
                "step_s": statistics.median(rounds[memory]),
                "parameters": max(each.parameters for each in held[memory]),
                "gradients_and_buckets": max(
                    each.gradients + each.buckets_peak for each in held[memory]
                ),
            }
            for memory in trained
        }
        print(
            json.dumps(figures | {"low_over_fast_s": statistics.median(ratios)}, indent=1),
            flush=True,
        )
        RESULTS.write_text(json.dumps(figures | {"ratios": ratios}, indent=1) + "\n")


def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """The median of some steps."""
    each = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        each.append(time.perf_counter() - start)
    return statistics.median(each)


def main(rate: str) -> None:
    """Build the lab and run every rank in it."""
    sys.exit(Lab(RANKS, rate).launch(Job((sys.executable, __file__, "rank"), RANKS)).exit_code)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["rank"] else main(*sys.argv[1:] or ["1gbit"])
