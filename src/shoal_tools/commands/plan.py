"""`shoal plan`: for the ranks that are here, or for imagined ones."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.core.facts import Cluster, Link, Topology
from shoal.core.numbers import MOST_RANKS_HERE, MOST_RANKS_IMAGINED
from shoal.front.options import Options
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.options import (
    EXPLAIN,
    NEW_FILE,
    Finite,
    bytes_per_s,
    in_a_folder,
    recipe_command,
)


@click.command()
@recipe_command
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
    type=Finite(0),
    help="With --ranks: a message's latency.",
)
@click.option(
    "--cores-per-rank",
    default=2.0,
    show_default=True,
    type=Finite(0, min_open=True),
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
    ranks: int | None,
    ranks_per_host: int,
    servers: int,
    rate: str,
    latency_us: float,
    cores_per_rank: float,
    save: Path | None,
    save_profile: Path | None,
    reasons: bool,
) -> None:
    """Plan RECIPE, for these ranks or imagined ones; --explain says why."""
    cluster = None
    if ranks is not None:
        link = Link(latency_us / 1e6, bytes_per_s(rate) / min(ranks, ranks_per_host))
        hosts = tuple(f"h{rank // ranks_per_host}" for rank in range(ranks))
        others = tuple(
            f"server{number}" for number in range(servers) for _ in range(ranks_per_host)
        )
        cluster = Cluster(Topology(hosts), link, cores_per_rank, servers=others)
    worker.plan(recipe, options, cluster, save=save, save_profile=save_profile, reasons=reasons)
