"""`shoal features`."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.front.recipe import load
from shoal_tools.commands import evaluation
from shoal_tools.commands.launch_options import distributed
from shoal_tools.commands.options import NEW_FILE, RANKS, RECIPE, WEIGHTS, ending_in


@click.command()
@RECIPE
@click.option(
    "--layers", required=True, metavar="NAME,…", help="Dotted names of layers of the model."
)
@click.option(
    "-o",
    "--out",
    required=True,
    type=NEW_FILE,
    callback=ending_in(".parquet", ".pq"),
    help="A Parquet file: a row's number as id, and what each layer gives for it.",
)
@click.option(
    "--data",
    type=click.Choice(["test", "train"]),
    default="test",
    show_default=True,
    help="Which of the recipe's data.",
)
@WEIGHTS
@RANKS
def features(
    recipe: Path, layers: str, out: Path, data: str, weights: Path | None, workers: int | None
) -> None:
    """Write the outputs of layers of RECIPE's model, row by row."""
    loaded = load(recipe)
    distributed(workers)
    names = [name.strip() for name in layers.split(",") if name.strip()]
    evaluation.features(loaded, weights, names, out, of_training=data == "train")
