"""A job of ranks that train a GPT with dropout in a pipeline, in ways that must draw alike.

Each rank prints "alike" if all ways give the bits of the first one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from one_process import adamw, built
from piped import plain
from small_models import Block, Gpt, of_words, words
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shoal

STEPS, HALF = 4, 2
HALVES = ("words", "places", "blocks.[0].*"), ("blocks.[12].*", "norm", "head")


class Checkpointed(Gpt):
    """A GPT that computes its blocks again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(dropout=0.3)
        self.reentrant = reentrant
        for block in self.blocks:
            assert isinstance(block, Block)
            block.forward = self._again(block.forward)  # type: ignore[method-assign]

    def _again(self, forward: Any) -> Any:
        def again(x: Tensor) -> Any:
            return checkpoint(forward, x, use_reentrant=self.reentrant)

        return again


def trained(
    make: Any, begin: int, end: int, before: Path | None = None, after: Path | None = None
) -> dict[str, Tensor]:
    """Train for some of the steps, from a checkpoint and into one."""
    torch.manual_seed(5)
    world, model = shoal.world(), built(make)
    rows = slice(12 * world.rank // world.size, 12 * (world.rank + 1) // world.size)
    own = [(x[rows], y[rows]) for x, y in words()]
    model, loss_fn, optimizer = shoal.parallelize(
        model,
        of_words,
        adamw(model.parameters()),
        sample=own[0],
        pins={layer: f"pipeline:{rank}" for rank, half in enumerate(HALVES) for layer in half},
        micro_batches=2,
    )
    if before:
        shoal.load(before, model=model, optimizer=optimizer)
    plain(model, loss_fn, optimizer, own[begin:end])
    if after:
        shoal.save(after, model=model, optimizer=optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    shoal.unparallelize(model)
    return state


def computed(schedule: str) -> dict[str, Tensor]:
    """Train with a compute_loss, by that schedule."""
    torch.manual_seed(5)
    world, model = shoal.world(), built(lambda: Gpt(dropout=0.3))
    rows = slice(12 * world.rank // world.size, 12 * (world.rank + 1) // world.size)
    own = [(x[rows], y[rows]) for x, y in words()]
    model, compute, optimizer = shoal.parallelize(
        model,
        None,
        adamw(model.parameters()),
        sample=own[0],
        compute_loss=lambda model, batch: of_words(model(batch[0]), batch[1]),
        pins={layer: f"pipeline:{rank}" for rank, half in enumerate(HALVES) for layer in half},
        micro_batches=2,
        schedule=schedule,
    )
    for batch in own[:STEPS]:
        optimizer.zero_grad()
        compute(model, batch).backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    shoal.unparallelize(model)
    return state


def main(folder: Path) -> None:
    shoal.init()

    def usual() -> Gpt:
        return Gpt(dropout=0.3)

    first = trained(usual, 0, STEPS)
    trained(usual, 0, HALF, after=folder / "half")
    ways = {
        "again": trained(usual, 0, STEPS),
        "resumed": trained(usual, HALF, STEPS, before=folder / "half"),
        "checkpointed": trained(lambda: Checkpointed(reentrant=False), 0, STEPS),
        "reentrant": trained(lambda: Checkpointed(reentrant=True), 0, STEPS),
        "without": trained(Gpt, 0, STEPS),
    }
    alike = {
        way: all(torch.equal(value, first[name]) for name, value in state.items())
        for way, state in ways.items()
    }
    one, other = computed("all_forward"), computed("1f1b")
    alike["1f1b"] = all(torch.allclose(one[n], other[n], rtol=0, atol=1e-10) for n in one)
    print("alike:", *(way for way, is_alike in alike.items() if is_alike), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
