"""A job of processes in which rank 0 acts alone: looks, evaluates and saves, and others wait.

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
        output = stepped(model, loss_fn, optimizer, x, y)
        of_whole = stepped(whole, nn.CrossEntropyLoss(), one, *joined)[: len(x)]
        if world.is_main:
            assert_equal(looks(output, y), looks(of_whole, y))
            check(model, optimizer, whole, one, x)
        if step == 0:
            dist.barrier()
    print(f"rank {world.rank} is done")


def stepped(model: Any, loss_fn: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    output = model(x)
    loss_fn(output, y).backward()
    optimizer.step()
    return output


def looks(output: Any, y: Any) -> Seen:
    """Read an output whose gradient has come back."""
    right = (output.argmax(-1) == y).double().mean()
    read = {"a row": output[0].tolist(), "loss": nn.functional.cross_entropy(output, y).item()}
    return {"right": right, **{name: torch.tensor(value) for name, value in read.items()}}


def check(model: Any, optimizer: Any, whole: Any, one: Any, x: Any) -> None:
    seen: list[Seen] = [habit(model, optimizer, x) for habit in (evaluates, saves)]
    expected = [habit(copy.deepcopy(whole), one, x) for habit in (evaluates, saves)]
    for own, theirs in zip(seen, expected, strict=True):
        assert_equal(own, theirs)


if __name__ == "__main__":
    main(sys.argv[1])
