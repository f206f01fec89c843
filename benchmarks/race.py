"""Seconds to a loss: learning by samples, off the network, times the pace of a step, in the lab.

    .venv/bin/python benchmarks/race.py learn text                   from random weights
    .venv/bin/python benchmarks/race.py learn text --trained 400     going on from 400 exact steps
    .venv/bin/python benchmarks/race.py learn textures --ways exact "local first"
    sudo .venv/bin/shoal lab --hosts 4 --rate 100mbit -- \
        .venv/bin/python benchmarks/race.py pace examples/gpt.py --name gpt-100mbit
    .venv/bin/python benchmarks/race.py table text gpt-100mbit

Each part can be run in pieces, by --ways and --seeds: a run, or a pace, that its file has is not
made again. Files are results/race-TASK.json and results/race-pace-NAME.json.

learn   tasks and ranks are those of accuracy.py, and `textures`, a small ResNet on generated
        pictures. A run's loss is the mean of its last three judgements. Its price is how many times
        the samples it takes for that loss, beside the exact run of its seed
pace    mean seconds of a step, whole rounds of local steps, one way after the other: on a quiet
        machine. "plain" sends nothing
table   seconds to a loss = pace × price, over the pace with nothing sent. DDP learns as exact does
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from accuracy import HERE, RANKS, TASKS, Runs, Task, task_named, trained
from curves import Curve
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.front.recipe import load
from shoal.session.session import current
from shoal_tools.contenders.peers import Peer, Workload, plain, ready

EXACT, JUDGED = "exact", 3
ROUND = 16
PEERS = ("plain", "ddp", "ddp:fp16", "ddp:powersgd4")  # that learn as exact does, but the last
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


def options_of(way: str, steps: int) -> dict[str, Any]:
    """What `parallelize` is asked for by a way, of a run of so many steps."""
    if way == EXACT:
        return {"pins": {"*": "replicate:allreduce"}}
    words = way.split()
    if words[0] != "local":
        exchange = "replicate:allreduce" if way == "low_rank" else "sliced:direct"
        return {"pins": {"*": f"{exchange}+{way}"}}
    rule = "average" if "average" in words else "nesterov"
    first = steps // 4 if "first" in words else 0
    outer = shoal.Outer(rule=rule, lag=0)
    lossy = shoal.Lossy(local_steps=ROUND, outer=outer, first=shoal.Beginning(first))
    codecs = [word for word in words if word.startswith("sparse_bits")]
    pins = {"*": f"replicate:direct+{codecs[0]}"} if codecs else {}
    return {"lossy": lossy, "pins": pins}


class Residual(nn.Module):
    """Two convolutions around their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def textures(rows: int = 32) -> Task:
    """A small ResNet that tells waves of eight directions apart, in noise."""

    def pictures(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(8, (count,), generator=random)
        angles = kinds * (torch.pi / 8) + 0.1 * torch.randn(count, generator=random)
        lengths = 2 + 3 * torch.rand(count, generator=random)
        phases = 6.3 * torch.rand(count, generator=random)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        along = x * angles.cos().view(-1, 1, 1) + y * angles.sin().view(-1, 1, 1)
        waves = (6.3 * along / lengths.view(-1, 1, 1) + phases.view(-1, 1, 1)).sin()
        noise = 1.5 * torch.randn(count, 16, 16, generator=random)
        return (waves + noise)[:, None], kinds

    held_out = pictures(1024, torch.Generator().manual_seed(-1))

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        random = torch.Generator().manual_seed(seed)
        while True:
            yield pictures(rows, random)

    @torch.no_grad()
    def judge(model: nn.Module) -> float:
        return float(F.cross_entropy(model(held_out[0]), held_out[1]))

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            Residual(16),
            nn.Conv2d(16, 32, 3, 2, padding=1),
            nn.ReLU(),
            Residual(32),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 8),
        )

    return Task(network, F.cross_entropy, batches, judge, "held-out loss", 400)


def task_of(name: str) -> Task:
    return textures() if name == "textures" else task_named(name)


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
    about = {"task": name, "steps": steps, "every": asked.every, "ranks": RANKS}
    runs = Runs(HERE / f"results/race-{name}.json", about)
    how = {"steps": steps, "every": asked.every}
    made = {way: partial(trained, task, **how, **options_of(way, steps)) for way in asked.ways}
    runs.make(made, asked.seeds)
    for way, price in prices(task, runs.curves).items():
        print(f"| {way} | {price[0]:.4f} | {price[1]:.2f} | {price[2]} |")


def prices(
    task: Task, curves: Mapping[str, Mapping[str, Curve]]
) -> dict[str, tuple[float, float, int]]:
    """For each way its end, the mean of its prices by seed, and how many seeds there are.

    A way that is better than exact at its end has the price 1.
    """
    found = {}
    for way, by_seed in curves.items():
        ends = {
            seed: mean(value for _, value in curve[-JUDGED:]) for seed, curve in by_seed.items()
        }
        of_seeds = [price_of(task, curves[EXACT][seed], end) for seed, end in ends.items()]
        if ends:
            found[way] = mean(ends.values()), mean(of_seeds), len(of_seeds)
    return found


def price_of(task: Task, exact: Curve, end: float) -> float:
    """How many times the samples exact steps would need less for the same end."""
    means = [
        (exact[at][0], mean(value for _, value in exact[max(0, at - JUDGED + 1) : at + 1]))
        for at in range(len(exact))
    ]
    for (before, worse), (step, value) in itertools.pairwise(means):
        if task.worse(value, end) <= 0 <= task.worse(worse, end) and value != worse:
            at = before + (step - before) * (worse - end) / (worse - value)
            return max(1.0, exact[-1][0] / at)
    return 1.0 if task.worse(end, means[-1][1]) <= 0 else float("inf")


def pace(asked: argparse.Namespace) -> None:
    """Measure what is missing, inside a lab."""
    world, path = shoal.init(), HERE / f"results/race-pace-{asked.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known = current().comm.gather_objects(known, "paces that are known")[0]
    recipe = load(asked.recipe)
    batch = recipe.batch(next(iter(shoal.shard(recipe.data()[0]))))
    work = Workload(recipe.model, recipe.loss(), recipe.optimizer, batch)
    for way in asked.ways:
        if way in known:
            continue
        peer = ready(way, work) if way in PEERS else _shoals(work, way)
        steps = ROUND if way.startswith("local") else asked.steps
        _seconds(peer, batch, steps)  # the first steps are not judged
        known[way] = mean(_seconds(peer, batch, steps) for _ in range(asked.rounds))
        if way not in PEERS:
            shoal.unparallelize(peer.model)
        if world.is_main:
            path.write_text(json.dumps(known) + "\n")
            print(f"{way}: {known[way]:.4f} s", flush=True)


def _shoals(work: Workload, way: str) -> Peer:
    """A peer that Shoal trains: by the planner if it is exact, or one of its words."""
    peer = plain(work)
    how = (
        {} if way == EXACT else {"accuracy": way} if way in ("near", "fast") else options_of(way, 0)
    )
    given = peer.model, peer.loss, peer.optimizer
    _, peer.loss, _ = shoal.parallelize(*given, sample=work.batch, **how)
    return peer


def _seconds(peer: Peer, batch: tuple[Any, Any], steps: int) -> float:
    """Mean seconds of a step, of the slowest rank."""
    current().comm.gather_objects(None, "a turn begins")
    began = perf_counter()
    for _ in range(steps):
        peer.step(*batch)
    seconds = perf_counter() - began
    return max(current().comm.gather_objects(seconds, "a turn ends")) / steps


def table(asked: argparse.Namespace) -> None:
    """Print seconds to a loss by way, as a multiple of exact steps with nothing sent."""
    task = task_of(asked.task.removesuffix("-trained"))
    learnt = json.loads((HERE / f"results/race-{asked.task}.json").read_text())["curves"]
    paces = json.loads((HERE / f"results/race-pace-{asked.name}.json").read_text())
    of_ways = {way: price for way, (_, price, _) in prices(task, learnt).items()}
    of_ways |= dict.fromkeys(("plain", "ddp", "ddp:fp16"), 1.0)
    print("| way | s/step | times the samples | time to a loss ÷ nothing sent |")
    print("|---|---|---|---|")
    for way, step_s in paces.items():
        if way in of_ways:
            times = step_s * of_ways[way] / paces["plain"]
            print(f"| {way} | {step_s:.3f} | {of_ways[way]:.2f} | {times:.2f} |")


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
    learning.add_argument("--every", type=int, default=ROUND)
    learning.add_argument("--trained", type=int, default=0, help="exact steps before")
    learning.set_defaults(run=learn)
    pacing = parts.add_parser("pace")
    pacing.add_argument("recipe", type=Path)
    pacing.add_argument("--name", required=True)
    pacing.add_argument("--ways", nargs="*", default=[*PEERS, "near", "fast", *WAYS])
    pacing.add_argument("--steps", type=int, default=2)
    pacing.add_argument("--rounds", type=int, default=2)
    pacing.set_defaults(run=pace)
    tabled = parts.add_parser("table")
    tabled.add_argument("task")
    tabled.add_argument("name")
    tabled.set_defaults(run=table)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
