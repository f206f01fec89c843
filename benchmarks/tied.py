"""A GPT whose head has the weight of its table: served whole, and cut over the ranks.

    PYTHONPATH=examples shoal lab --hosts 2 --rate 100mbit -- python benchmarks/tied.py

20,000 words of width 128, two blocks, 2 × 64 words a rank. Ways train in turn in the same
processes. Rank 0 prints of each the predicted step and the median of measured ones, in seconds, and
the way of the weight.
"""

from __future__ import annotations

import argparse
import copy
import time
from statistics import median
from typing import Any

import torch
from gpt import GPT
from torch import Tensor
from torch.nn import functional as F

import shoal

WAYS: dict[str, dict[str, Any]] = {
    "replicate": {"pins": {"*": "replicate"}},
    "without a cut": {"strategies": ["replicate", "sliced", "factor"]},
    "tied": {"pins": {"head": "tied"}},
    "pipeline": {"pins": {"*": "pipeline"}},
    "auto": {},
}


def loss_of(output: Tensor, words: Tensor) -> Tensor:
    """Return the mean loss of a word."""
    return F.cross_entropy(output.flatten(0, 1), words.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2, help="of a rank")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    shoal.init(timeout_s=120)
    rank = shoal.world().rank
    torch.manual_seed(0)
    whole = GPT(options.words, 64, width=options.width, num_blocks=2, num_heads=2)
    whole.head.weight = whole.letter.weight
    torch.manual_seed(rank)
    x, y = torch.randint(options.words, (2, options.rows, 64))
    for way in options.ways * options.rounds:
        model = copy.deepcopy(whole)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, loss_fn, _ = shoal.parallelize(model, loss_of, optimizer, sample=(x, y), **WAYS[way])
        plan, seconds = shoal.plan_of(model), []
        for _ in range(options.steps + 2):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began_s)
        if rank == 0:
            served = plan.choice("letter").way
            figures = f"{plan.predicted_s:.3f} predicted, {median(seconds[2:]):.3f} measured"
            print(f"{way:14} {figures}, weight {served}", flush=True)
        shoal.unparallelize(model)


if __name__ == "__main__":
    main()
