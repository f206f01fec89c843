"""`shoal lab`."""

from __future__ import annotations

import sys

import click

from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.launch.lab import QUEUE, Lab


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--hosts", default=2, show_default=True, type=click.IntRange(1), help="Hosts, a link to each."
)
@click.option(
    "--ranks-per-host",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Ranks that share a host.",
)
@click.option(
    "--servers",
    default=0,
    type=click.IntRange(0),
    help='More hosts, as servers (strategy "server").',
)
@click.option(
    "--tail",
    default=0,
    type=click.IntRange(0),
    help='More hosts, for the end of models (strategy "stage").',
)
@click.option(
    "--rate",
    default="1gbit",
    show_default=True,
    help='Each link\'s rate, as tc writes it, or "none".',
)
@click.option("--delay", help="Latency between hosts (5ms); needs a kernel with netem.")
@click.option(
    "--queue", default=QUEUE, show_default=True, help="How long a packet may wait at a link."
)
@click.option(
    "--congestion",
    default="cubic",
    show_default=True,
    help="TCP's congestion control (bbr, reno …).",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lab(
    hosts: int,
    ranks_per_host: int,
    servers: int,
    tail: int,
    rate: str,
    delay: str | None,
    queue: str,
    congestion: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on hosts with shaped links (root, Linux).

    The hosts are network namespaces of this machine; ranks fill one host after the other, and the
    output of a rank carries its host's name (h1; with several ranks on each, h1.0 is the first on
    h1).

    For instance: shoal lab --hosts 4 --rate 1gbit -- python script.py
    """
    built = Lab(
        hosts + servers + tail,
        rate,
        delay,
        queue=queue,
        ranks_per_host=ranks_per_host,
        congestion=congestion,
    )
    if missing := built.missing():
        raise UsageError(f"a lab cannot be built here: {missing}")
    others = {"SHOAL_SERVERS": servers, "SHOAL_TAIL": tail}
    serving = {name: str(number * ranks_per_host) for name, number in others.items() if number}
    sys.exit(
        built.launch(Job(command, (hosts + servers + tail) * ranks_per_host, serving)).exit_code
    )
