"""`shoal test`."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.front.recipe import load
from shoal_tools.commands import evaluation
from shoal_tools.commands.launch_options import distributed
from shoal_tools.commands.options import RANKS, RECIPE, WEIGHTS


@click.command()
@RECIPE
@WEIGHTS
@RANKS
def test(recipe: Path, weights: Path | None, workers: int | None) -> None:
    """Find RECIPE's loss and accuracy over its test data, each row once."""
    loaded = load(recipe)
    distributed(workers)
    evaluation.test(loaded, weights)
