"""`shoal report`: a run's record as a page."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.front import text
from shoal_tools.commands.options import NEW_FILE, ending_in
from shoal_tools.report.run_file import load, write


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=NEW_FILE,
    callback=ending_in(".html", ".htm"),
    help="The page; by default RUN's name with .html at its end.",
)
def report(run: Path, output: Path | None) -> None:
    """Draw RUN, which `--report run.json` wrote, as a page of HTML.

    For instance: shoal report run.json -o report.html
    """
    path = output or run.with_suffix(".html")
    write(load(run), path)
    text.console().print(f"wrote {path}", soft_wrap=True, highlight=False)
