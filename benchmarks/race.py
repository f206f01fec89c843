"""Seconds to a loss: learning by samples, off the network, times the pace of a step, in the lab.

    .venv/bin/python benchmarks/race.py learn text                   from random weights
    .venv/bin/python benchmarks/race.py learn text --trained 400     going on from 400 exact steps
    .venv/bin/python benchmarks/race.py learn textures --ways exact "local first"
    sudo .venv/bin/shoal lab --hosts 4 --rate 100mbit -- \
        .venv/bin/python benchmarks/race.py pace examples/gpt.py --name gpt-100mbit
    .venv/bin/python benchmarks/race.py table text gpt-100mbit
    sudo .venv/bin/shoal lab --hosts 4 --rate 10mbit -- .venv/bin/python benchmarks/race.py \
        whole text text-10mbit --way "local average int4" --steps 448 --called 448

Each part can be run in pieces, by --ways and --seeds: a run, or a pace, that its file has is not
made again. Files are results/race-TASK.json and results/race-pace-NAME.json.

learn   tasks and ranks are those of accuracy.py, and `textures`, a small ResNet on generated
        pictures. A run's loss is the mean of its last three judgements. Its price is how many times
        the samples it takes for that loss, beside the exact run of its seed
pace    seconds of a step, in whole rounds of local steps. All ways take turns, block by block, and
        the median of a way's blocks counts. "plain" sends nothing
table   seconds to a loss = pace × price, over the pace with nothing sent. DDP learns as exact does
whole   one run from its start to its end in a lab, judged with the clock held: its seconds, beside
        pace × steps, and its price, beside the one that was learned off the network
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from accuracy import HERE, RANKS, TASKS, Runs, Task, trained
from curves import Curve
from race_paces import PEERS, WORDS, pace, table, whole
from race_ways import EXACT, options_of, prices, task_of

WAYS = (
    EXACT,
    "int8",
    "int4",
    "one_bit",
    "top_k",
    "low_rank",
    "local",
    "local average",
    "local sparse_bits",
    "local first",
    "local first sparse_bits",
)


def alone(task: Task, seed: int, steps: int, every: int) -> Curve:
    """The curve of exact steps: those of one process on whole batches."""
    torch.manual_seed(seed)
    model, batches, curve = task.model(), task.batches(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    for step in range(1, steps + 1):
        x, y = next(batches)
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
        if step % every == 0:
            curve.append((step, task.judge(model)))
    return curve


def going_on(task: Task, steps: int) -> Task:
    """The task from weights that so many exact steps of one process have trained."""
    torch.manual_seed(1000)
    model, batches = task.model(), task.batches(1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
    for _ in range(steps):
        x, y = next(batches)
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
    about = (task.loss, task.batches, task.judge, task.judged_by, task.steps, task.rate / 3)
    return Task(lambda: copy.deepcopy(model), *about)


def learn(asked: argparse.Namespace) -> None:
    """Train what is missing, and print the prices."""
    task = task_of(asked.task)
    steps, name = asked.steps or task.steps, asked.task
    if asked.trained:
        task, name = going_on(task, asked.trained), f"{name}-trained"
    if asked.called:
        name = f"{name}-{asked.called}"
    about = {"task": name, "steps": steps, "every": asked.every, "ranks": RANKS}
    runs = Runs(HERE / f"results/race-{name}.json", about)
    how = {"steps": steps, "every": asked.every}
    made = {
        way: partial(alone, task, **how)
        if way == EXACT
        else partial(trained, task, **how, **options_of(way, steps))
        for way in asked.ways
    }
    runs.make(made, asked.seeds)
    for way, price in prices(task, runs.curves).items():
        print(f"| {way} | {price[0]:.4f} | {price[1]:.2f} | {price[2]} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    learning = parts.add_parser("learn")
    learning.add_argument("task", choices=[*TASKS, "textures"])
    learning.add_argument("--ways", nargs="*", default=WAYS)
    learning.add_argument("--seeds", type=int, default=3)
    learning.add_argument("--steps", type=int)
    learning.add_argument("--every", type=int, default=16)
    learning.add_argument("--called", default="", help="a word for the file of other lengths")
    learning.add_argument("--trained", type=int, default=0, help="exact steps before")
    learning.set_defaults(run=learn)
    pacing = parts.add_parser("pace")
    pacing.add_argument("recipe", help="a recipe's file, or the name of a task")
    pacing.add_argument("--name", required=True)
    pacing.add_argument("--ways", nargs="*", default=[*PEERS, *WORDS])
    pacing.add_argument("--steps", type=int, default=2)
    pacing.add_argument("--rounds", type=int, default=2)
    pacing.add_argument("--warm", type=int, default=1, help="blocks that are not judged")
    pacing.set_defaults(run=pace)
    wholly = parts.add_parser("whole")
    wholly.add_argument("task", choices=[*TASKS, "textures"])
    wholly.add_argument("name", help="of the file with the paces")
    wholly.add_argument("--way", required=True)
    wholly.add_argument("--steps", type=int)
    wholly.add_argument("--every", type=int, default=64)
    wholly.add_argument("--called", default="", help="of the file with what was learned")
    wholly.add_argument("--seed", type=int, default=0)
    wholly.set_defaults(run=whole)
    tabled = parts.add_parser("table")
    tabled.add_argument("task")
    tabled.add_argument("name")
    tabled.set_defaults(run=table)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
