"""Thirty cells of 2 to 4 hosts: how far is the planner's own plan from its prediction?

    sudo .venv/bin/python benchmarks/own_plans.py --json own.json
    .venv/bin/python benchmarks/own_plans.py --summary own.json

A cell is a model of cell_models.py in a lab, whose ranks share the processors as the kernel has it.
It is measured as cells.py does. In two cells of each lab the planner's plan takes turns with the
three others that are predicted to come nearest.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cell_models import MODELS
from cells import OWN, Cell, measured

import shoal
from shoal.planner.simpler_plans import KINDS, strategies_of

SEED = 55
LABS = (
    ("100mbit", 2),
    ("500mbit", 2),
    ("300mbit", 3),
    ("200mbit", 4),
    ("500mbit", 4),
    ("1gbit", 3),
)
A_LAB, RACES = 5, 2  # cells, and those in which plans race
WITHIN = 0.18


def cells() -> list[Cell]:
    """Return all cells, lab by lab."""
    draw = random.Random(SEED)
    names = [name for _ in range(3) for name in draw.sample(list(MODELS), len(MODELS))]
    return [
        Cell(A_LAB * lab + at, names[A_LAB * lab + at], rate, hosts, OWN, at < RACES)
        for lab, (rate, hosts) in enumerate(LABS)
        for at in range(A_LAB)
    ]


def rank(path: Path, lab: int) -> None:
    """Measure one lab's cells, as one of its ranks."""
    torch.set_num_threads(1)
    world = shoal.init(timeout_s=600)
    for cell in cells()[A_LAB * lab :][:A_LAB]:
        found = measured(cell)
        if world.rank == 0:
            row = {"model": cell.model, "rate": cell.rate, "hosts": cell.hosts, **found}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)


def kind_of(served: dict[str, int]) -> str:
    """Return the kind of a plan, by the ways that serve its layers."""
    names = {re.split(r"[:+]", way)[0] for way in served}
    return [kind for kind in KINDS if strategies_of((kind,), names)][-1]


def line(row: dict[str, Any]) -> str:
    """Return a cell as one line."""
    times = row["step_s"] / row["predicted_s"]
    best = ""
    if row.get("race"):
        fastest = min(seconds for _, seconds in row["race"].values())
        best = f"; {row['race'][OWN][1] / fastest:.2f} of the best of {len(row['race'])} plans"
    return (
        f"{row['model']:12} {row['rate']:8} {row['hosts']} hosts  {kind_of(row['served']):18} "
        f"{row['predicted_s']:.3f} s predicted, {row['step_s']:.3f} measured, {times:.2f}{best}"
    )


def summary(path: Path) -> None:
    """Print the errors of all cells, and of each kind."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    for row in rows:
        print(line(row))
    times = {kind: [] for kind in (*KINDS, "all")}
    for row in rows:
        for kind in (kind_of(row["served"]), "all"):
            times[kind].append(row["step_s"] / row["predicted_s"])
    for kind, found in times.items():
        if found:
            errors = [abs(each - 1) for each in found]
            within = sum(error <= WITHIN for error in errors)
            print(
                f"{kind:18} {len(found)} cells, measured ÷ predicted {median(found):.2f}, error "
                f"{median(errors):.1%} in the median, {within} within {WITHIN:.0%}"
            )
    races = [row["race"] for row in rows if row.get("race")]
    near = sum(race[OWN][1] <= 1.05 * min(s for _, s in race.values()) for race in races)
    print(f"within 5% of the best plan in {near} of {len(races)} races")


def main() -> None:
    """Run the labs, be a rank of one, or sum up."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("own.json"))
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--lab", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
    elif options.lab is not None:
        rank(options.json, options.lab)
    else:
        for lab, (rate, hosts) in enumerate(LABS):
            start = [sys.executable, "-m", "shoal", "lab", "--hosts", str(hosts), "--rate", rate]
            inside = [sys.executable, __file__, "--json", str(options.json), "--lab", str(lab)]
            subprocess.run([*start, "--", *inside], check=False)
        summary(options.json)


if __name__ == "__main__":
    main()
