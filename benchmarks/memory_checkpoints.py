"""Generations in the hosts' memory: their cost in a step, predicted and measured.

    sudo .venv/bin/python benchmarks/memory_checkpoints.py examples/alexnet.py --rate 1gbit
    sudo .venv/bin/python benchmarks/memory_checkpoints.py examples/gpt.py --rate 300mbit

About 15 minutes each, on a quiet machine: a lab of 4 hosts, a rank each. Blocks of 40 steps with
`in_memory_every=20` and without take turns. In a block with it both generations begin and end.
Printed are bytes, predicted and measured seconds of each rank, and how much longer blocks are. The
figures go to benchmarks/results/memory-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

import shoal
from shoal.front.recipe import load as load_recipe
from shoal.session.session import ranks

HERE = Path(__file__).parent
EVERY, BLOCK, BOUND = 20, 40, 0.05


def measure(recipe_path: Path, rounds: int, out: Path) -> None:
    """Be one rank of the lab; rank 0 writes the figures."""
    world = shoal.init()
    recipe = load_recipe(recipe_path)
    torch.manual_seed(0)
    model, loss_fn = recipe.model(), recipe.loss()
    optimizer = recipe.optimizer(model.parameters())
    x, y = recipe.batch(next(iter(shoal.shard(recipe.data()[0]))))
    shoal.parallelize(model, loss_fn, optimizer, sample=(x, y))
    saved = {"model": model, "optimizer": optimizer}
    blocks: dict[bool, list[float]] = {False: [], True: []}
    costs = []
    with shoal.Checkpoints(
        out.parent / "run", every_s=1e7, in_memory_every=EVERY, **saved
    ) as checkpoints:

        def train(steps: int, *, counted: bool) -> float:
            begin_s = time.perf_counter()
            for _ in range(steps):
                loss_fn(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if counted:
                    checkpoints.step()
            model.state_dict()  # all is there
            ranks().gather_objects(None, "the end of a block")
            return time.perf_counter() - begin_s

        train(2 * EVERY + EVERY - 1, counted=True)  # both slots get their memory
        for turn in range(2 * rounds):
            counted = turn % 2 == 1
            blocks[counted].append(train(BLOCK, counted=counted))
            if counted and checkpoints.memory_cost is not None:
                costs.append(asdict(checkpoints.memory_cost))
    of_ranks = ranks().gather_objects(costs, "costs of ranks")
    if world.rank == 0:
        figures = {
            "plan": str(shoal.plan_of(model)),
            "blocks_s": blocks[False],
            "blocks_with_generations_s": blocks[True],
            "costs": of_ranks,
        }
        out.write_text(json.dumps(figures, indent=1))


def report(figures: dict[str, object]) -> None:
    """Print what generations cost."""
    plain = statistics.median(figures["blocks_s"])
    taking = statistics.median(figures["blocks_with_generations_s"])
    print(figures["plan"])
    for rank, costs in enumerate(figures["costs"]):
        if not costs:
            print(f"rank {rank}: no generation")
            continue
        middle = {
            name: statistics.median(cost[name] or 0.0 for cost in costs)
            for name in costs[0]
            if name != "step"
        }
        print(
            f"rank {rank}: {middle['kept_bytes'] / 1e6:.1f} MB kept, "
            f"{middle['sent_bytes'] / 1e6:.1f} MB sent; copy predicted "
            f"{middle['predicted_copy_s']:.3f} s, measured {middle['copy_s']:.3f} s; "
            f"link predicted {middle['predicted_link_s']:.3f} s, "
            f"sent within {middle['sent_s']:.2f} s"
        )
    print(
        f"{BLOCK} steps {plain:.2f} s, with a generation every {EVERY} steps {taking:.2f} s: "
        f"{taking / plain - 1:+.1%} (bound {BOUND:.0%})"
    )


def main() -> None:
    """Run the lab, or be a rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="this process is a rank")
    asked = parser.parse_args()
    if asked.out is not None:
        torch.set_num_threads(1)
        measure(asked.recipe, asked.rounds, asked.out)
        return
    with tempfile.TemporaryDirectory(prefix="shoal-memory-") as name:
        out = Path(name) / "figures.json"
        rank = [sys.executable, __file__, str(asked.recipe.absolute())]
        rank += ["--rounds", str(asked.rounds), "--out", str(out)]
        lab = [sys.executable, "-m", "shoal", "lab", "--hosts", str(asked.hosts)]
        subprocess.run([*lab, "--rate", asked.rate, "--", *rank], check=True, cwd=HERE.parent)
        shutil.copy(out, HERE / "results" / f"memory-{asked.recipe.stem}.json")
        report(json.loads(out.read_text()))


if __name__ == "__main__":
    main()
