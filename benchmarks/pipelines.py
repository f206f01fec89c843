"""Pipelines beside DDP, Shoal's other plans, and no network, on hosts of a lab.

    shoal lab --hosts 4 --rate 100mbit -- python benchmarks/pipelines.py --model gpt21m

A GPT of 21 M parameters (8 blocks of width 384, 8,192 words) on 2 × 128 tokens a rank, plain or
with tied ends. Each way trains in turn in the same processes. Rank 0 prints a line for each: the
median step in seconds, and the seconds of set-up.

    plain, ddp       nothing sent; DDP with its usual buckets
    pipeline, parts  every rank has layers; the same, with each rank's rows in --parts parts
    even             as parts, with as many blocks on each rank
    pairs            groups of two ranks, with as many layers each
    dealt            a pipeline by the planner, which may take groups of ranks and parts of rows
    coded            as parts, with values that cross as bfloat16
    auto, exact      the planner's own plan; the best exact one without a pipeline
    auto:bfloat16    the planner's own plan, which may use bfloat16
    speed            as exact, with rows of the ranks by --shares

Hosts of unlike speed, of which the second has a third of a core:

    shoal lab --hosts 2 --rate 100mbit --cores 1,0.33 -- python benchmarks/pipelines.py \\
        --rows 8 --parts 4 --shares 12 4 --ways plain parts even speed parts plain

Groups of the two ranks of each host:

    shoal lab --hosts 2 --ranks-per-host 2 --rate 100mbit --cores 0.5 -- \\
        python benchmarks/pipelines.py --ways plain pipeline pairs dealt exact pipeline pairs dealt
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import gpu_ethernet
import torch
from gpt import GPT
from gpu_ethernet import DEVICE, RANK, WAYS, Made, Task, be_apart, by_shoal, letters_loss, measure
from torch import nn

import shoal

SIZES = {  # words, width, blocks, rows of a rank, tokens of a row
    "gpt21m": (8192, 384, 8, 2, 128),
    "gpt25m": (4096, 512, 7, 2, 128),
    "small": (512, 96, 4, 2, 32),
}


def gpt(size: str, *, tied: bool, own_rows: int | None) -> Task:
    """A GPT of one of these sizes."""
    words, width, blocks, usual, tokens = SIZES[size]
    rows = own_rows or usual

    def model() -> nn.Module:
        made = GPT(words, tokens, width=width, num_blocks=blocks, num_heads=max(1, width // 64)).to(
            DEVICE
        )
        if tied:
            made.head.weight = made.letter.weight
        return made

    x, y = torch.randint(words, (2, rows, tokens), device=DEVICE)
    return Task(model, letters_loss, (x, y))


def even(task: Task, parts: int) -> Made:
    """A pipeline that has as many blocks on each rank."""
    model = task.model()
    names = [name for name, module in model.named_modules() if [*module.parameters(False)]]
    ranks = int(os.environ["WORLD_SIZE"])
    holders = [at * ranks // len(names) for at in range(len(names))]
    pins = {f"model.{name}": f"pipeline:{rank}" for name, rank in zip(names, holders, strict=True)}
    return by_shoal(task, pins=pins, micro_batches=parts)


def pairs(task: Task, parts: int) -> Made:
    """A pipeline in which pairs of ranks hold as many layers each."""
    model = task.model()
    names = [name for name, module in model.named_modules() if [*module.parameters(False)]]
    count = int(os.environ["WORLD_SIZE"]) // 2
    held = [2 * (at * count // len(names)) for at in range(len(names))]
    pins = {
        f"model.{name}": f"pipeline:{first}+{first + 1}"
        for name, first in zip(names, held, strict=True)
    }
    return by_shoal(task, pins=pins, micro_batches=parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="gpt21m")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--ways", nargs="+", default=["plain", "ddp", "pipeline"])
    parser.add_argument("--rows", type=int, help="of a rank")
    parser.add_argument("--parts", type=int, default=2, help="of the rows of a rank")
    parser.add_argument("--shares", type=int, nargs="*", help="rows of each rank, for speed")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=300, help="then stacks are printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    be_apart()
    gpu_ethernet.AUTOCAST = DEVICE == "cuda"
    WAYS["parts"] = partial(by_shoal, pins={"*": "pipeline"}, micro_batches=options.parts)
    WAYS["coded"] = partial(by_shoal, pins={"*": "pipeline+bfloat16"}, micro_batches=options.parts)
    WAYS["auto:bfloat16"] = partial(by_shoal, codecs=["bfloat16"])
    WAYS["dealt"] = partial(by_shoal, strategies=["pipeline"])
    WAYS["even"] = partial(even, parts=options.parts)
    WAYS["pairs"] = partial(pairs, parts=1)
    WAYS["speed"] = WAYS["exact"]
    shoal.init(timeout_s=120)
    rows = dict.fromkeys(options.ways, options.rows)
    if options.shares:
        rows["speed"] = options.shares[RANK]
    tasks = {way: gpt(options.model, tied=options.tied, own_rows=rows[way]) for way in rows}
    if RANK == 0:
        print(f"{options.model}{' tied' if options.tied else ''}, torch {torch.__version__}")
    for _ in range(options.rounds):
        for way in options.ways:
            measure(way, tasks[way], options.steps, options.limit_s)


if __name__ == "__main__":
    main()
