"""`shoal train`."""

from __future__ import annotations

from typing import Any

import click

from shoal.front.options import Options
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.launch_options import launching
from shoal_tools.commands.options import (
    COUNT,
    EXPLAIN,
    NEW_FILE,
    PLAN,
    RANKS,
    REPORT,
    NamedPath,
    feature_options,
    in_a_folder,
    recipe_command,
    seconds,
)
from shoal_tools.commands.worker import TrainingRun


@click.command()
@launching
@recipe_command
@RANKS
@EXPLAIN
@PLAN
@feature_options
@click.option("--save-plan", type=NEW_FILE, callback=in_a_folder, help="Write the plan there.")
@click.option("--epochs", type=COUNT, help="Passes over the data; the recipe's EPOCHS by default.")
@click.option(
    "--steps",
    "--max-steps",
    "max_steps",
    type=COUNT,
    help="End after this many steps, however many passes they take.",
)
@click.option(
    "--checkpoint",
    type=NamedPath(file_okay=False, stores=True),
    metavar="FOLDER",
    help="Save the run there now and then, at its end, and on SIGTERM or Ctrl-C; go on from the "
    'newest checkpoint in it. Also "s3://bucket/run" (fsspec).',
)
@click.option(
    "--every",
    "every_s",
    default="10min",
    show_default=True,
    metavar="TIME",
    callback=seconds,
    help="From one checkpoint to the next, as 30s, 10min or 2h.",
)
@REPORT
@click.option(
    "--json",
    "json_path",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write the time of a step, the predicted time and the plan there.",
)
def train(recipe: Recipe, options: Options, **wanted: Any) -> None:
    """Train RECIPE, after showing its plan."""
    worker.train(recipe, options, TrainingRun(**wanted))
