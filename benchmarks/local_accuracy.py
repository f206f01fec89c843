"""What local steps cost in accuracy: the same samples in the same order, exact and by each rule.

    .venv/bin/python benchmarks/local_accuracy.py digits        ten minutes of one core
    .venv/bin/python benchmarks/local_accuracy.py text          half an hour of one core

Tasks, ranks and judging are those of codec_accuracy.py. Each way is a rule and H, as "nesterov 16".
H is 4, as where four steps hide the exchange, 16 and 64. Ranks are judged by the weights that all
have in common. Curves go to results/local-TASK.json after each run; a run that is there already is
not made again. At the end it prints a table.

A way is held against exact seed by seed. It may be off by 0.5 points of accuracy, or by the larger
of 1 % of the loss and two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from codec_accuracy import Curve, digits, table, text, trained

import shoal
from shoal.core.outer import RULES

HERE = Path(__file__).parent
EXACT = "exact"
PART = 0.01  # of the loss
# small learning rates are usual for a small H
RATES = {"nesterov-0.3": shoal.Outer(lr=0.3)}


def options_of(way: str) -> dict[str, Any]:
    """What `parallelize` is asked for a way such as "nesterov 16"."""
    if way == EXACT:
        return {}
    rule, steps = way.split()
    outer = RATES[rule] if rule in RATES else shoal.Outer(rule=rule)
    return {"local_steps": int(steps), "outer": outer}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["digits", "text"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--rules", nargs="*", default=[*RULES, *RATES])
    parser.add_argument("--local-steps", nargs="*", type=int, default=[4, 16, 64])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    task = digits() if asked.task == "digits" else text()
    steps = asked.steps or task.steps // asked.every * asked.every
    out = asked.out or HERE / f"results/local-{asked.task}.json"
    about = {"task": asked.task, "steps": steps, "every": asked.every}
    kept = json.loads(out.read_text()) if out.exists() else {**about, "curves": {}}
    if {name: kept[name] for name in about} != about:
        sys.exit(f"{out} has other runs than {about}: name another file with --out")
    curves: dict[str, dict[str, Curve]] = kept["curves"]
    ways = [EXACT, *(f"{rule} {h}" for h in asked.local_steps for rule in asked.rules)]
    for seed in map(str, range(asked.seeds)):  # all ways of a seed, then the next
        for way in ways:
            if seed not in curves.setdefault(way, {}):
                options = options_of(way)
                curves[way][seed] = trained(task, int(seed), steps, asked.every, **options)
                out.write_text(json.dumps(kept) + "\n")
    print(table(task, curves, PART))


if __name__ == "__main__":
    main()
