"""`shoal probe`, and `shoal cache`: links as measured now, and figures of earlier starts."""

from __future__ import annotations

import click
import msgspec

from shoal.core import cache_folder
from shoal.core.errors import UsageError
from shoal_tools.commands import worker
from shoal_tools.commands.launch_options import distributed
from shoal_tools.commands.options import RANKS


@click.command()
@RANKS
def probe(workers: int | None) -> None:
    """Measure the links between the ranks."""
    distributed(workers)
    worker.probe()


@click.command()
@click.option("--clear", is_flag=True, help="Delete the files: the next start measures all anew.")
def cache(clear: bool) -> None:
    """List the figures of earlier starts on this machine, or delete them."""
    folder = cache_folder.folder()
    if folder is None:
        click.echo("SHOAL_CACHE=off: nothing is kept")
        return
    entries = cache_folder.entries()
    click.echo(f"{folder}: {len(entries)} files")
    for path in entries:
        if clear:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(
                    "a file cannot be deleted", got=str(error), do="delete it as its owner"
                ) from error
            continue
        try:
            written = cache_folder.about(path).written
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            written = f"cannot be read ({error})"
        click.echo(f"  {path.name}  {path.stat().st_size:,} bytes  {written}")
    if clear and entries:
        click.echo("deleted")
