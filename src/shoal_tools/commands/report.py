"""`shoal report`: a run's record as a page."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.core.errors import UsageError
from shoal.front import text
from shoal_tools.commands.options import NEW_FILE, in_a_folder
from shoal_tools.report.run_file import load, write


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=NEW_FILE,
    callback=in_a_folder,
    help="The page; by default RUN's name with .html at its end.",
)
def report(run: Path, output: Path | None) -> None:
    """Draw RUN, which `--report run.json` of another command wrote, as a page of HTML.

    For instance: shoal report run.json -o report.html
    """
    path = output or run.with_suffix(".html")
    if path.suffix == ".json":
        raise UsageError(
            "a page is no JSON", got=f"--output {path}", do="give a path that ends in .html"
        )
    write(load(run), path)
    text.console().print(f"wrote {path}", soft_wrap=True, highlight=False)
