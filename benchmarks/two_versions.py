"""Two checkouts of Shoal on one recipe, step for step in turn, in one lab: is one of them slower?

    sudo .venv/bin/python benchmarks/two_versions.py --before DIR --after DIR \\
        --recipe examples/gpt.py --rate 1gbit

Machines drift, so both jobs stand ready at once in the same hosts and take turns (A B A B …): the
one that waits sleeps. Both follow one plan, which the first of them makes. A turn's figure is the
median step of the slowest rank, after one step that is not counted. The ratio is the median over
rounds of after ÷ before, its 95 % interval a bootstrap over rounds. A ratio above 1 says that the
second checkout is slower.

Needs root and Linux (the lab), and memory for both jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERSIONS = ("before", "after")
PORTS = {"before": 29511, "after": 29512}
BOOTSTRAPS = 10_000
POLL_S = 0.01


def wait_for(paths: list[Path]) -> None:
    """Sleep until all of the files are there."""
    while not all(path.exists() for path in paths):
        time.sleep(POLL_S)


def marks(folder: Path, version: str, round_: int) -> list[Path]:
    """The files that say that every rank of a version has ended its turn of this round."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    return [folder / f"{version}-{round_}-{rank}" for rank in ranks]


def train(version: str, folder: Path, recipe_path: str, rounds: int, steps: int) -> None:
    """Be one rank of one version: make ready, then take its turns."""
    import torch  # noqa: PLC0415  (the checkout that PYTHONPATH names is imported here, in the rank)

    import shoal  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    recipe = runpy.run_path(recipe_path)
    if version == "after":  # it takes the plan of the other one, and makes ready when that is done
        wait_for(marks(folder, "before", -1))
    shoal.init(timeout_s=1800.0)
    torch.manual_seed(0)
    built = recipe["data"]()
    loader = shoal.shard(built[0] if isinstance(built, list | tuple) else built)
    batch = next(iter(loader))
    x, y = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
    model = recipe["model"]()
    plan_path = folder / "plan.json"
    model, loss_fn, optimizer = shoal.parallelize(
        model,
        recipe["loss"](),
        recipe["optimizer"](model.parameters()),
        sample=(x, y),
        plan="auto" if version == "before" else str(plan_path),
    )
    if version == "before" and rank == 0:
        shoal.plan_of(model).save(plan_path)

    def step() -> None:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(3):
        step()
    medians: list[float] = []
    (folder / f"{version}--1-{rank}").touch()
    for round_ in range(rounds):
        other_round = round_ if version == "after" else round_ - 1
        wait_for(marks(folder, VERSIONS[version == "before"], other_round))
        step()
        times = []
        for _ in range(steps):
            begin_s = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin_s)
        for parameter in model.parameters():  # nothing of this turn is left for the other one's
            parameter.detach()[..., :1].sum()
        medians.append(statistics.median(times))
        (folder / f"{version}-{round_}-{rank}").touch()
    (folder / f"{version}-{rank}.json").write_text(json.dumps(medians))
    wait_for(marks(folder, "after", rounds - 1))


def both(options: argparse.Namespace) -> None:
    """On one host of the lab: start this rank of both versions, and wait for them."""
    ranks = []
    for version in VERSIONS:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(Path(getattr(options, version)).resolve() / "src")
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = "10.0.0.1", str(PORTS[version])
        environment["OMP_NUM_THREADS"] = "1"
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        ranks.append(
            subprocess.Popen([sys.executable, *sys.argv, "--as", version], env=environment)
        )
    sys.exit(max(abs(rank.wait()) for rank in ranks))


def report(folder: Path, hosts: int) -> dict[str, object]:
    """Medians, and the ratio with its interval."""
    figures = {}
    for version in VERSIONS:
        of_ranks = [json.loads((folder / f"{version}-{r}.json").read_text()) for r in range(hosts)]
        figures[version] = [max(turn) for turn in zip(*of_ranks, strict=True)]
    ratios = [b / a for a, b in zip(figures["before"], figures["after"], strict=True)]
    drawn = random.Random(0)
    medians = sorted(
        statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS)
    )
    low, high = medians[BOOTSTRAPS // 40], medians[-BOOTSTRAPS // 40]
    return {
        "median_s": {version: statistics.median(times) for version, times in figures.items()},
        "after / before": {"median": statistics.median(ratios), "low": low, "high": high},
        "rounds_s": figures,
    }


def main() -> None:
    """Run the lab, or, within it, a rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for version in VERSIONS:
        parser.add_argument(f"--{version}", required=True, help="a checkout")
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="version", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.version:
        folder = Path(options.folder)
        train(options.version, folder, options.recipe, options.rounds, options.steps)
    elif options.folder:
        both(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            lab = [sys.executable, "-m", "shoal", "lab", "--hosts", str(options.hosts)]
            inside = [sys.executable, *sys.argv, "--folder", folder]
            subprocess.run([*lab, "--rate", options.rate, "--", *inside], check=True)
            figures = report(Path(folder), options.hosts)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        ratio = figures.pop("after / before")
        print(figures["median_s"], ratio)


if __name__ == "__main__":
    main()
