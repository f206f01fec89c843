"""`shoal probe`."""

from __future__ import annotations

import click

from shoal.commands import worker
from shoal.commands.launching import distributed
from shoal.commands.options import RANKS


@click.command()
@RANKS
def probe(workers: int | None) -> None:
    """Measure the links between the ranks."""
    distributed(workers)
    worker.probe()
