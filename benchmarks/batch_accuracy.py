"""What a batch of 64 costs in accuracy against one of 8, in equal epochs, and what helps.

    .venv/bin/python benchmarks/batch_accuracy.py digits        two minutes of one core
    .venv/bin/python benchmarks/batch_accuracy.py text          25 minutes of one core

Tasks and judging are those of accuracy.py: 0.5 points, or 1 % of the loss. As gradients are exact
on any number of ranks, one process trains. All ways see the same number of rows. A way is an
optimizer and what is done to its learning rate, which was found for 8 rows: nothing, or `scaled_lr`
by a rule, with a warm-up of a tenth of the steps. Rates of LARS and LAMB are the best of some at
64 rows, by seed 99.

Runs go to results/batch-TASK.json after each; one that is there already is not made again. At the
end it prints a table, against the batch of 8 seed by seed, and draws docs/lab/batch-TASK.svg.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from accuracy import HERE, JUDGED, Runs, parser, task_named
from curves import Curve
from pytorch_optimizer import LARS, Lamb
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import shoal

SMALL, LARGE = 8, 64
ROWS = {"digits": 32_768, "text": 8_192}  # that a run sees
JUDGEMENTS = 16
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OWN: dict[str, Make] = {
    "digits": partial(SGD, lr=0.01, momentum=0.9),
    "text": partial(AdamW, lr=1e-3),
}
SEARCHED: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "LARS": (LARS, (0.03, 0.1, 0.3, 1.0, 3.0)),
    "LAMB": (Lamb, (3e-4, 1e-3, 3e-3, 1e-2)),
}
RULES = ("", "linear", "sqrt")
PART = 0.01  # of the loss


def trained(name: str, make: Make, rule: str, rows: int, seed: int) -> Curve:
    """How one run is judged after so many rows."""
    task = task_named(name, rows=rows)
    torch.manual_seed(seed)
    model = task.model()
    optimizer, steps, curve = make(model.parameters()), ROWS[name] // rows, []
    scheduler = None
    if rule:
        how = {"batch": rows, "base_batch": SMALL, "rule": rule, "warmup_steps": steps // 10}
        scheduler = shoal.scaled_lr(optimizer, **how)
    batches = task.batches(seed)
    for step in range(1, steps + 1):
        x, y = next(batches)
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step % (steps // JUDGEMENTS) == 0:
            curve.append((step * rows, task.judge(model)))
    return curve[-JUDGEMENTS:]


def judged(curve: Curve) -> float:
    return sum(value for _, value in curve[-JUDGED:]) / JUDGED


def best_rate(name: str, kind: str) -> float:
    """The rate of LARS or LAMB that is best at 64 rows."""
    optimizer, rates = SEARCHED[kind]
    task = task_named(name, rows=LARGE)
    found = {
        rate: judged(trained(name, partial(optimizer, lr=rate), "", LARGE, 99)) for rate in rates
    }
    return min(found, key=lambda rate: task.worse(found[rate], 0.0))


def main() -> None:
    asked = parser(__doc__).parse_args()
    name, out = asked.task, asked.out or HERE / f"results/batch-{asked.task}.json"
    runs = Runs(out, {"task": name, "rows": ROWS[name]})
    rates = {kind: runs.remembered(kind, partial(best_rate, name, kind)) for kind in SEARCHED}
    own = "SGD" if name == "digits" else "AdamW"
    ways: dict[str, tuple[Make, str, int]] = {f"{SMALL} rows, {own}": (OWN[name], "", SMALL)}
    for rule in RULES:
        ways[f"{LARGE} rows, {own} {rule}".rstrip()] = OWN[name], rule, LARGE
    for kind, rate in rates.items():
        at_large = partial(SEARCHED[kind][0], lr=rate)
        ways[f"{LARGE} rows, {kind}"] = at_large, "", LARGE
        # of 8 rows the rate would be less by that rule, and is scaled up to the same
        at_small = partial(SEARCHED[kind][0], lr=rate / (LARGE / SMALL) ** 0.5)
        ways[f"{LARGE} rows, {kind} sqrt"] = at_small, "sqrt", LARGE
    runs.make({way: partial(trained, name, *how) for way, how in ways.items()}, asked.seeds)
    print(f"rates of LARS and LAMB: {rates}")
    picture = HERE.parent / f"docs/lab/batch-{name}.svg"
    runs.show(task_named(name, rows=LARGE), PART, picture, {way: way for way in runs.curves})


if __name__ == "__main__":
    main()
