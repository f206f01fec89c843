"""`shoal lab`."""

from __future__ import annotations

import sys
from typing import Any

import click

from shoal.contracts.launcher import Job
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS, MOST_RANKS_HERE, MOST_SECONDS
from shoal_tools.commands.options import Finite, FiniteEach
from shoal_tools.launch.lab import MAX_HOSTS, QUEUE, Lab
from shoal_tools.launch.quota import LEAST_CORES


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--hosts",
    default=2,
    show_default=True,
    type=click.IntRange(1, MAX_HOSTS),
    help="Hosts, a link to each.",
)
@click.option(
    "--ranks-per-host",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS_HERE),
    help="Ranks that share a host.",
)
@click.option(
    "--servers",
    default=0,
    type=click.IntRange(0, MAX_HOSTS),
    help='More hosts, as servers (strategy "server").',
)
@click.option(
    "--tail",
    default=0,
    type=click.IntRange(0, MAX_HOSTS),
    help='More hosts, for the end of models (strategy "pipeline").',
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
@click.option(
    "--cores",
    type=FiniteEach(LEAST_CORES, MOST_RANKS),
    help="Of each rank, as by a quota (0.25), or by host (1,0.33); by default ranks share all.",
)
@click.option(
    "--grace",
    "grace_s",
    default=15.0,
    show_default=True,
    type=Finite(0, MOST_SECONDS),
    help="Seconds for ranks to save and end, after Ctrl-C or once one has failed.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lab(
    command: tuple[str, ...],
    hosts: int,
    servers: int,
    tail: int,
    ranks_per_host: int,
    grace_s: float,
    **network: Any,
) -> None:
    """Run COMMAND on hosts with shaped links (root, Linux).

    The hosts are network namespaces of this machine, and ranks fill one host after the other. The
    output of a rank carries its host's name, h1. With several ranks on each host, h1.0 is the first
    one on h1.

    For instance: shoal lab --hosts 4 --rate 1gbit -- python script.py
    """
    num_hosts = hosts + servers + tail
    if (ranks := num_hosts * ranks_per_host) > MOST_RANKS_HERE:
        raise UsageError(
            f"a lab has at most {MOST_RANKS_HERE} ranks, which one machine starts",
            got=f"{num_hosts} hosts × {ranks_per_host} = {ranks}",
            do="ask for fewer",
        )
    # Lab's own arguments have the names of the other flags
    built = Lab(num_hosts, ranks_per_host=ranks_per_host, **network)
    if missing := built.missing():
        raise UsageError(f"a lab cannot be built here: {missing}")
    job = Job(
        command,
        ranks,
        grace_s=grace_s,
        servers=servers * ranks_per_host,
        tail=tail * ranks_per_host,
        ranks_per_host=ranks_per_host,
    )
    sys.exit(built.launch(job).exit_code)
