"""A job of processes in which rank 0 acts alone: evaluates and saves, while others do not train.

alone_job.py WAY    the others wait in a barrier of torch, and then are at their end
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from test_alone import LAYERS, WAYS, Seen, assert_equal, batch, built, evaluates, saves
from torch import nn
from torch.optim import Adam

import shoal


def main(way: str) -> None:
    world = shoal.init(timeout_s=60)
    model, whole = built(way), built(way)
    (x, y), of_all = batch(way, world.rank, 0), [batch(way, rank, 0) for rank in range(world.size)]
    model, loss_fn, optimizer = shoal.parallelize(
        model,
        nn.CrossEntropyLoss(),
        Adam(model.parameters(), 0.01),
        sample=(x, y),
        pins=dict(zip(LAYERS, WAYS[way], strict=True)),
    )
    one = Adam(whole.parameters(), 0.01)
    joined = [torch.cat(parts) for parts in zip(*of_all, strict=True)]
    for step in range(2):
        stepped(model, loss_fn, optimizer, x, y)
        stepped(whole, nn.CrossEntropyLoss(), one, *joined)
        if world.is_main:
            check(model, optimizer, whole, one, x)
        if step == 0:
            dist.barrier()
    print(f"rank {world.rank} is done")


def stepped(model: Any, loss_fn: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()


def check(model: Any, optimizer: Any, whole: Any, one: Any, x: Any) -> None:
    seen: list[Seen] = [habit(model, optimizer, x) for habit in (evaluates, saves)]
    expected = [habit(copy.deepcopy(whole), one, x) for habit in (evaluates, saves)]
    for own, theirs in zip(seen, expected, strict=True):
        assert_equal(own, theirs)


if __name__ == "__main__":
    main(sys.argv[1])
