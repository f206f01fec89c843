"""`shoal test`."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.commands import evaluation
from shoal.commands.options import RANKS, distributed
from shoal.front.recipe import load

WEIGHTS = click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Of the model: a folder of `shoal train --checkpoint`, one of its checkpoints, a file of "
    "safetensors, or of torch.save(model.state_dict()).",
)


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@WEIGHTS
@RANKS
def test(recipe: Path, weights: Path | None, workers: int | None) -> None:
    """Find RECIPE's loss and accuracy over its test data, each row once."""
    loaded = load(recipe)
    distributed(workers)
    evaluation.test(loaded, weights)
