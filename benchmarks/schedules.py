"""One forward, one backward beside all forward, all backward: seconds of a step, and memory.

    shoal lab --hosts 4 --rate 100mbit -- python benchmarks/schedules.py --rows 4 --parts 2 4

The GPT of 21 M of pipelines.py, with its loss in a compute_loss. Both schedules train in turn in
the same processes, for each number of parts of a rank's rows. Rank 0 prints the median step, and
then the most bytes that autograd keeps at a time on each rank, in a step of its own.

    python benchmarks/schedules.py --imagined

prints the ratio of the paces of even stations on processors of their own. A forward takes 1, a
backward 2, and what crosses a cut 0, 0.3 or 1.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from gpt import GPT
from pipelines import SIZES
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.pipeline.schedule import Task, one_forward_one_backward
from shoal_tools.testing.saved_bytes import SavedBytes

ORDERS = ("all_forward", "1f1b")


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of all tokens."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def pinned(blocks: int, ranks: int) -> dict[str, str]:
    """Give each rank as many blocks."""
    pins = {"*": f"pipeline:{ranks - 1}", "letter": "pipeline:0", "position": "pipeline:0"}
    for block in range(blocks):
        pins[f"blocks.{block}.*"] = f"pipeline:{block * ranks // blocks}"
    return pins


def length(order: Sequence[Task], ranks: int, crossing: float) -> float:
    """Return the length of a step, in forwards of a micro-batch at a station."""
    came: dict[Task, float] = {}  # moments at which the results of tasks are at the next station
    free, link = dict.fromkeys(range(ranks), 0.0), dict.fromkeys(range(ranks), 0.0)
    for task in order:
        before = task._replace(station=task.station + (1 if task.is_back else -1))
        begin = max(free[task.station], came.get(before, 0.0))
        free[task.station] = begin + (2.0 if task.is_back else 1.0)
        link[task.station] = max(link[task.station], free[task.station]) + crossing
        came[task] = link[task.station]
    return max(free.values())


def imagined(ranks: int, parts: int, crossing: float) -> float:
    """Return the pace of one forward, one backward over that of all forward."""
    brings = tuple(micro // parts for micro in range(ranks * parts))
    every = range(len(brings))
    there = [Task(station, micro, False) for station in range(ranks) for micro in every]
    both = [*there, *(task._replace(is_back=True) for task in there[::-1])]
    early = one_forward_one_backward(tuple(range(ranks)), brings)
    return length(both, ranks, crossing) / length(early, ranks, crossing)


@dataclass(frozen=True)
class Training:
    """A model that trains by one of the schedules."""

    model: Any
    compute: Any
    optimizer: Any
    batch: tuple[Tensor, Tensor]

    def step(self) -> float:
        """Make a step, and return its seconds."""
        begin_s = time.perf_counter()
        self.optimizer.zero_grad()
        self.compute(self.model, self.batch).backward()
        self.optimizer.step()
        return time.perf_counter() - begin_s

    def kept(self) -> list[float]:
        """Return the most megabytes that autograd keeps in a step, on each rank."""
        saved = SavedBytes(self.model.parameters())
        with saved.watch():
            self.step()
        return [float(peak) for peak in shoal.gather(torch.tensor([saved.peak / 1e6]))]


def training(size: str, batch: tuple[Tensor, Tensor], parts: int, order: str) -> Training:
    """Parallelize a GPT."""
    words, width, blocks, _, tokens = SIZES[size]
    torch.manual_seed(0)
    model: Any = GPT(words, tokens, width, blocks, max(1, width // 64))
    made = shoal.parallelize(
        model,
        None,
        torch.optim.AdamW(model.parameters(), 1e-4),
        sample=batch,
        compute_loss=compute_loss,
        pins=pinned(blocks, shoal.world().size),
        micro_batches=parts,
        schedule=order,
    )
    return Training(*made, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="gpt21m")
    parser.add_argument("--rows", type=int, default=4, help="of a rank")
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4], help="of these rows")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--imagined", action="store_true")
    options = parser.parse_args()
    if options.imagined:
        for parts in (1, 2, 4):
            paces = [f"{imagined(4, parts, crossing):.2f}" for crossing in (0.0, 0.3, 1.0)]
            print(f"4 ranks, {4 * parts} micro-batches:", *paces)
        return
    torch.set_num_threads(1)
    world = shoal.init(timeout_s=300)
    words, _, _, _, tokens = SIZES[options.model]
    torch.manual_seed(world.rank)
    x, y = torch.randint(words, (2, options.rows, tokens))
    for parts in options.parts:
        both = {order: training(options.model, (x, y), parts, order) for order in ORDERS}
        for order in ORDERS:
            both[order].step()
            kept = both[order].kept()
            if world.rank == 0:
                print(f"{order} keeps", ", ".join(f"{peak:.0f}" for peak in kept), "MB", flush=True)
        for _, order in product(range(options.rounds), ORDERS):
            step_s = median(both[order].step() for _ in range(options.steps))
            if world.rank == 0:
                count = parts * world.size
                print(f"{count} micro-batches, {order}: {step_s:.3f} s a step", flush=True)
        for trained in both.values():
            shoal.unparallelize(trained.model)
        both.clear()
        gc.collect()


if __name__ == "__main__":
    main()
