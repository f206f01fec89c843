"""`shoal check`."""

from __future__ import annotations

import sys

import click
import torch

from shoal.front.options import Options
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.options import COUNT, PLAN, RANKS, recipe_command


@click.command()
@recipe_command
@RANKS
@PLAN
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps to train.")
@click.option(
    "--float32", is_flag=True, help="In float32, which shows rounding; the criterion is float64's."
)
def check(recipe: Recipe, options: Options, steps: int, float32: bool) -> None:
    """Compare RECIPE on all ranks with one process on the global batch."""
    worst = worker.check(
        recipe, options, steps=steps, dtype=torch.float32 if float32 else torch.float64
    )
    if not float32 and not worst <= worker.CRITERION:
        click.echo(
            f"shoal: not the same as one process: {worst:.1e} is over {worker.CRITERION:.0e}",
            err=True,
        )
        sys.exit(1)
