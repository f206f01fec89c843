"""What local steps cost in accuracy: the same samples in the same order, exact and by each rule.

    .venv/bin/python benchmarks/local_accuracy.py digits        a quarter of an hour of one core
    .venv/bin/python benchmarks/local_accuracy.py text          half an hour of two cores
    .venv/bin/python benchmarks/local_accuracy.py text --exact-first 112 --local-steps 16

Tasks and judging are those of accuracy.py: 0.5 points, or 1 % of the loss. Each way is a rule and
H, as "nesterov 16". H is 4, as where four steps hide the exchange, 16 and 64. Ranks are judged by
the weights that all have in common. Curves go to results/local-TASK.json after each run; a run that
is there already is not made again. At the end it prints a table, and draws the ways of H = 16 in
docs/lab/local-TASK.svg.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from accuracy import HERE, Runs, parser, task_named, trained

import shoal
from shoal.core.outer_step import RULES

EXACT = "exact"
PART = 0.01  # of the loss
DRAWN = " 16"  # ways that end so
# small learning rates are usual for a small H
RATES = {"nesterov-0.3": shoal.Outer(lr=0.3)}


def options_of(way: str, exact_first: int) -> dict[str, Any]:
    """What `parallelize` is asked for a way such as "nesterov 16", behind so many exact steps."""
    if way == EXACT:
        return {}
    rule, steps = way.split()
    outer = RATES[rule] if rule in RATES else shoal.Outer(rule=rule)
    return {"local_steps": int(steps), "outer": replace(outer, warmup_steps=exact_first)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int)
    options.add_argument("--every", type=int, default=64)
    options.add_argument("--exact-first", type=int, default=0)
    options.add_argument("--rules", nargs="*", default=[*RULES, *RATES])
    options.add_argument("--local-steps", nargs="*", type=int, default=[4, 16, 64])
    asked = options.parse_args()
    task, every = task_named(asked.task), asked.every
    steps = asked.steps or task.steps // every * every
    about = {"task": asked.task, "steps": steps, "every": every}
    name, first = f"local-{asked.task}", asked.exact_first
    if first:
        about["exact_first"], name = first, f"{name}-after-{first}"
    runs = Runs(asked.out or HERE / f"results/{name}.json", about)
    ways = [EXACT, *(f"{rule} {h}" for h in asked.local_steps for rule in asked.rules)]
    runs.make(
        {
            way: partial(trained, task, steps=steps, every=every, **options_of(way, first))
            for way in ways
        },
        asked.seeds,
    )
    picture = HERE.parent / f"docs/lab/{name}.svg"
    names = {way: way for way in runs.curves if way == EXACT or way.endswith(DRAWN)}
    runs.show(task, PART, picture, names)


if __name__ == "__main__":
    main()
