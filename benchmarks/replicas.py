"""What the check of replicas costs: seconds of a check against seconds of a hundred steps.

    torchrun --nproc-per-node 2 benchmarks/replicas.py [--recipe alexnet] [--steps 30]

Rank 0 prints the median step and the median check, digests and messages together, and what part of
the time that is at the default of one check in a hundred backwards. The recipe is a file of
examples/; momentum is added, so that there is state to compare.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

import shoal
from shoal.engine.replicas import EVERY, Replicas

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="alexnet")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--check-every", type=int, default=3)
    asked = parser.parse_args()
    recipe = import_module(asked.recipe)
    world = shoal.init()
    torch.manual_seed(0)
    model, loss_fn = recipe.model(), recipe.loss()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    loader = recipe.data()
    loader = shoal.shard(loader[0] if isinstance(loader, tuple) else loader)
    sample = next(iter(loader))
    checks: list[float] = []
    look = Replicas.look

    def timed(self: Replicas, where: str) -> None:
        begin_s = time.perf_counter()
        look(self, where)
        checks.append(time.perf_counter() - begin_s)

    Replicas.look = timed  # type: ignore[method-assign]
    shoal.parallelize(
        model,
        loss_fn,
        optimizer,
        sample=sample,
        pins={"*": "replicate"},
        check_every=asked.check_every,
    )
    steps: list[float] = []
    x, y = sample
    for _ in range(asked.steps):
        before, begin_s = len(checks), time.perf_counter()
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        steps.append(time.perf_counter() - begin_s - sum(checks[before:]))
    if world.is_main:
        step_s, check_s = statistics.median(steps[2:]), statistics.median(checks[1:])
        nbytes = 2 * sum(p.nbytes for p in model.parameters())
        print(
            f"{asked.recipe}, {world.size} ranks: step {step_s * 1e3:.1f} ms, check "
            f"{check_s * 1e3:.2f} ms of {nbytes / 1e6:.0f} MB, {check_s / (EVERY * step_s):.4%} of "
            f"the time at one check in {EVERY}"
        )


if __name__ == "__main__":
    main()
