"""Models whose fat layers are worth cutting over the ranks: tuned DDP ÷ Shoal in a lab of four hosts.

    sudo .venv/bin/python benchmarks/cut_layers.py [NAME ...]      forty minutes for all; figures in results/NAME.json

Each line is one `shoal bench` under `shoal lab`, as in first_light.py. DDP's steps are long: few of them are taken.
"""

from __future__ import annotations

import json
import subprocess
import sys

from first_light import HERE, Case, row

CASES = [
    Case("alexnet", "1gbit", rounds=4, steps=3, against="ddp,plain"),
    Case("recipes/classes200k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/alexnet22k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/clicks", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/words50k", "1gbit", rounds=4, steps=2, against="ddp,plain"),
    Case("recipes/classes200k", "200mbit", rounds=2, steps=1),
]


def main() -> None:
    """Run the named cases, or all, and print a table."""
    wanted = sys.argv[1:] or [case.name for case in CASES]
    for case in CASES:
        if case.name in wanted:
            subprocess.run(case.command(), cwd=HERE.parent, check=True)
    print("| recipe, link | Shoal | DDP | DDP ÷ Shoal (95 %) | predicted ÷ measured |\n|---|---|---|---|---|")
    for case in CASES:
        path = HERE / "results" / f"{case.name}.json"
        if path.exists():
            print(row(case, json.loads(path.read_text())))


if __name__ == "__main__":
    main()
