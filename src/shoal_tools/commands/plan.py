"""`shoal plan`: for the ranks of this session, or for imagined ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.numbers import MOST_RANKS_HERE, MOST_RANKS_IMAGINED
from shoal.front.options import Options
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.options import (
    CORES,
    EXPLAIN,
    LATENCY_US,
    NEW_FILE,
    bytes_per_s,
    in_a_folder,
    model_command,
)


@dataclass(frozen=True)
class ImaginedHosts:
    """Imagined hosts that a plan is made for, and the network between them.

    Args:
        ranks: number of ranks that train; None if no host is imagined.
        ranks_per_host: ranks that share a host and its link.
        servers: hosts that own parameters and do not train.
        rate: rate of each host's link, as `tc` writes it.
        latency_us: microseconds that a message takes.
        cores_per_rank: processor cores of a rank.
    """

    ranks: int | None
    ranks_per_host: int
    servers: int
    rate: str
    latency_us: float
    cores_per_rank: float

    def cluster(self) -> Cluster | None:
        """Return the cluster of these hosts; None if no host is imagined."""
        if self.ranks is None:
            return None
        shared = min(self.ranks, self.ranks_per_host)
        link = Link(self.latency_us / 1e6, bytes_per_s(self.rate) / shared)
        hosts = tuple(f"h{rank // self.ranks_per_host}" for rank in range(self.ranks))
        others = tuple(
            f"server{number}" for number in range(self.servers) for _ in range(self.ranks_per_host)
        )
        return Cluster(Topology(hosts), link, self.cores_per_rank, servers=others)


@click.command()
@model_command()
@EXPLAIN
@click.option(
    "--workers",
    "-w",
    type=click.IntRange(1, MOST_RANKS_HERE),
    help="Start this many ranks on this machine, and plan for them.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, MOST_RANKS_IMAGINED),
    help="Imagine this many ranks, and plan for them without a network.",
)
@click.option(
    "--ranks-per-host",
    default=1,
    show_default=True,
    type=click.IntRange(1, MOST_RANKS_IMAGINED),
    help="With --ranks: that share a link.",
)
@click.option(
    "--servers",
    default=0,
    type=click.IntRange(0, MOST_RANKS_IMAGINED),
    help="With --ranks: more such hosts, as servers.",
)
@click.option("--rate", default="1gbit", show_default=True, help="With --ranks: each link's rate.")
@click.option(
    "--latency-us",
    default=100.0,
    show_default=True,
    type=LATENCY_US,
    help="With --ranks: a message's latency.",
)
@click.option(
    "--cores-per-rank",
    default=2.0,
    show_default=True,
    type=CORES,
    help="With --ranks: below 2, lanes take compute time.",
)
@click.option(
    "--save",
    "--save-plan",
    "save",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write the plan there.",
)
@click.option(
    "--save-profile",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write what was measured there, for shoal simulate --from.",
)
def plan(
    recipe: Recipe,
    options: Options,
    save: Path | None,
    save_profile: Path | None,
    reasons: bool,
    **imagined: Any,
) -> None:
    """Plan RECIPE, for these ranks or imagined ones; --explain says why."""
    _check_ranks(imagined)
    cluster = ImaginedHosts(**imagined).cluster()
    worker.plan(recipe, options, cluster, save=save, save_profile=save_profile, reasons=reasons)


def _check_ranks(imagined: Mapping[str, Any]) -> None:
    """Raise UsageError if flags for imagined ranks are given, but none are imagined."""
    source = click.get_current_context().get_parameter_source
    given = [name for name in imagined if source(name) is ParameterSource.COMMANDLINE]
    if imagined["ranks"] is None and given:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{flag} is for imagined ranks, and none are imagined",
            got=flag,
            do=f"add --ranks with their number, or leave {flag} out",
        )
