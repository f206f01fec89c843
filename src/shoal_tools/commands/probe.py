"""`shoal probe`."""

from __future__ import annotations

import click

from shoal_tools.commands import worker
from shoal_tools.commands.launching import distributed
from shoal_tools.commands.options import RANKS


@click.command()
@RANKS
def probe(workers: int | None) -> None:
    """Measure the links between the ranks."""
    distributed(workers)
    worker.probe()
