"""`shoal check`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import torch

from shoal.front.options import Options
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.launch_options import launching
from shoal_tools.commands.options import (
    COUNT,
    NEW_FILE,
    PLAN,
    RANKS,
    Finite,
    feature_options,
    in_a_folder,
    model_command,
)


@click.command()
@launching
@model_command(compares=True)
@RANKS
@PLAN
@feature_options
@click.option("--steps", default=5, show_default=True, type=COUNT, help="Steps to train.")
@click.option(
    "--float32", is_flag=True, help="In float32, which shows rounding; the criterion is float64's."
)
@click.option(
    "--within",
    type=Finite(0.0, 1e6),
    metavar="NUMBER",
    help="The largest relative difference that counts as the same: 1e-10 by default. Ways that are "
    "not exact need more.",
)
@click.option(
    "--json",
    "json_path",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write the difference of each parameter there.",
)
def check(
    recipe: Recipe,
    options: Options,
    steps: int,
    float32: bool,
    within: float | None,
    json_path: Path | None,
) -> None:
    """Compare RECIPE on all ranks with one process on the global batch."""
    wanted = worker.Comparison(
        steps,
        torch.float32 if float32 else torch.float64,
        worker.CRITERION if within is None else within,
        json_path,
    )
    worst = worker.check(recipe, options, wanted)
    if (not float32 or within is not None) and not worst <= wanted.within:
        click.echo(
            f"shoal: not the same as one process: {worst:.1e} is over {wanted.within:.0e}",
            err=True,
        )
        sys.exit(1)
