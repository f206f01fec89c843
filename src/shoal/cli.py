"""The command line: parses, calls, prints. `shoal COMMAND --help` says the rest.

A command on a recipe runs on the ranks it finds itself among (torchrun's environment variables, as
under `shoal lab`), or starts `--ranks N` of them on this machine, each running the same command.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from shoal.commands import worker
from shoal.commands.bench import bench as run_bench
from shoal.commands.worker import PlanOptions
from shoal.contracts.launcher import Job
from shoal.core.buckets import MEMORY
from shoal.core.errors import ShoalError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.core.placement import BALANCED, POLICIES
from shoal.core.plan import MICRO_BATCHES
from shoal.front.recipe import Recipe, load
from shoal.launch import rendezvous
from shoal.launch.lab import QUEUE, Lab
from shoal.launch.local import Local
from shoal.report.errors import foreign, whole
from shoal.session.session import leave, world

_NEW_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
_PLAN = click.option("--plan", default="auto", help='A saved plan\'s path, or "auto".')
_RANKS = click.option(
    "--ranks",
    "--workers",
    "-w",
    "workers",
    type=click.IntRange(1),
    help="Start this many ranks on this machine (--workers is the old name).",
)
_EXPLAIN = click.option(
    "--explain",
    "reasons",
    is_flag=True,
    help="Say of each layer what else was compared, and why.",
)
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class _Reporting(click.Group):
    """Prints errors without Shoal's own frames, tells the other ranks, exits with 1 (2 for what the
    caller can fix).

    An error of the recipe's own comes with its traceback from where Shoal called it. With
    SHOAL_TRACEBACK=1 all frames of every error come first.
    """

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except ShoalError as error:
            self._show_frames(context, error)
            leave(error)
            usage = isinstance(error, UsageError)
            click.echo(f"shoal: {error.what if usage and _follows() else error}", err=True)
            sys.exit(2 if usage else 1)
        except Exception as error:
            self._show_frames(context, error)
            leave(error)
            click.echo(f"shoal: {foreign(error)}", err=True)
            sys.exit(1)

    @staticmethod
    def _show_frames(context: click.Context, error: Exception) -> None:
        if context.params["traceback"]:
            click.echo(whole(error), err=True)


def _follows() -> bool:
    """Whether rank 0 of the same session says all of what the caller can fix."""
    try:
        return world().rank > 0
    except UsageError:
        return False


@click.group(cls=_Reporting, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
@click.option(
    "--traceback",
    is_flag=True,
    envvar="SHOAL_TRACEBACK",
    show_envvar=True,
    help="Show all frames of an error, before its message.",
)
def main(traceback: bool) -> None:
    """Shoal trains PyTorch models on several machines joined by ordinary networks, and says why."""


def _in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse, before any work, a file that cannot be written when the work is done."""
    # who writes it
    if path is not None and rendezvous.is_first() and not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent}",
            got=f"{option.opts[0]} {path}",
            do="make the folder first",
        )
    return path


def _recipe_command(function: Callable[..., None]) -> Callable[..., None]:
    """A command on a recipe: called on every rank, with the recipe and what is said of its plan
    before its own.
    """

    @functools.wraps(function)
    def command(
        recipe: Path,
        workers: int | None,
        pin: tuple[str, ...],
        strategy: tuple[str, ...],
        placement: str,
        memory: str,
        memory_limit: float | None,
        micro_batches: int,
        plan: str = "auto",
        **own: Any,
    ) -> None:
        loaded = load(recipe)
        pins = _pins(pin) or None
        options = PlanOptions(
            plan, pins, strategy or None, memory, placement, memory_limit, micro_batches
        )
        _distributed(workers)
        function(loaded, options, **own)

    shared = [
        click.argument("recipe", type=click.Path(path_type=Path)),
        click.option(
            "--pin",
            multiple=True,
            metavar="LAYER=STRATEGY",
            help="Fix a layer's strategy; globs work.",
        ),
        click.option(
            "--strategy", multiple=True, metavar="NAME", help="Let the planner use only these."
        ),
        click.option(
            "--placement",
            type=click.Choice(POLICIES),
            default=BALANCED,
            show_default=True,
            help="How what owners update is dealt to them.",
        ),
        click.option(
            "--memory",
            type=click.Choice(MEMORY),
            default=MEMORY[0],
            show_default=True,
            help="With low, buckets that owners sum take memory only on their way.",
        ),
        click.option(
            "--memory-limit",
            type=click.FloatRange(0, min_open=True),
            metavar="BYTES",
            help="What a rank may hold between steps; 2e9 is 2 GB.",
        ),
        click.option(
            "--micro-batches",
            type=click.IntRange(1),
            default=MICRO_BATCHES,
            show_default=True,
            help="That a batch is cut into where the end of the model has hosts of its own.",
        ),
    ]
    for option in reversed(shared):
        command = option(command)
    return command


def _distributed(workers: int | None) -> None:
    """Become a launcher of this very command where ranks are to be started; return where this
    process is a rank.
    """
    if rendezvous.is_rank():
        return
    if workers is not None and workers > 1:
        command = (sys.executable, "-m", "shoal", *sys.argv[1:])
        sys.exit(Local().launch(Job(command, workers)).exit_code)


def _pins(texts: tuple[str, ...]) -> dict[str, str]:
    pins = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(
                "a pin is LAYER=STRATEGY",
                got=text,
                do="write for instance --pin 'classifier.*=factor'",
            )
        pins[name] = value
    return pins


def _steps_ahead(context: click.Context, option: click.Parameter, text: str) -> int | None:
    if text != "none" and not text.isdigit():
        raise click.BadParameter(f'{text!r} is not a number of steps, nor "none"')
    return None if text == "none" else int(text)


@main.command()
@_recipe_command
@_RANKS
@_EXPLAIN
@_PLAN
@click.option(
    "--staleness",
    default="0",
    show_default=True,
    metavar="STEPS",
    callback=_steps_ahead,
    help='With servers: how far a worker may run ahead; "none" for any number.',
)
@click.option("--save-plan", type=_NEW_FILE, callback=_in_a_folder, help="Write the plan there.")
@click.option(
    "--epochs", type=click.IntRange(1), help="Passes over the data; the recipe's EPOCHS by default."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="End after this many steps, however many passes they take.",
)
def train(
    recipe: Recipe,
    options: PlanOptions,
    staleness: int | None,
    save_plan: Path | None,
    epochs: int | None,
    steps: int | None,
    reasons: bool,
) -> None:
    """Train RECIPE, after showing its plan."""
    worker.train(
        recipe,
        replace(options, staleness=staleness),
        save=save_plan,
        epochs=epochs,
        max_steps=steps,
        reasons=reasons,
    )


@main.command()
@_recipe_command
@_EXPLAIN
@click.option(
    "--workers",
    "-w",
    type=click.IntRange(1),
    help="Start this many ranks on this machine, and plan for them.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Imagine this many ranks, and plan for them without a network.",
)
@click.option(
    "--ranks-per-host",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="With --ranks: that share a link.",
)
@click.option(
    "--servers",
    default=0,
    type=click.IntRange(0),
    help="With --ranks: more such hosts, as servers.",
)
@click.option("--rate", default="1gbit", show_default=True, help="With --ranks: each link's rate.")
@click.option(
    "--latency-us", default=100.0, show_default=True, help="With --ranks: a message's latency."
)
@click.option(
    "--cores-per-rank",
    default=2.0,
    show_default=True,
    help="With --ranks: below 2, lanes take compute time.",
)
@click.option(
    "--save",
    "--save-plan",
    "save",
    type=_NEW_FILE,
    callback=_in_a_folder,
    help="Write the plan there.",
)
def plan(
    recipe: Recipe,
    options: PlanOptions,
    ranks: int | None,
    ranks_per_host: int,
    servers: int,
    rate: str,
    latency_us: float,
    cores_per_rank: float,
    save: Path | None,
    reasons: bool,
) -> None:
    """Plan RECIPE, for these ranks or imagined ones; --explain says why."""
    cluster = None
    if ranks is not None:
        link = Link(latency_us / 1e6, _bytes_per_s(rate) / min(ranks, ranks_per_host))
        hosts = tuple(f"h{rank // ranks_per_host}" for rank in range(ranks))
        others = tuple(
            f"server{number}" for number in range(servers) for _ in range(ranks_per_host)
        )
        cluster = Cluster(Topology(hosts), link, cores_per_rank, servers=others)
    worker.plan(recipe, options, cluster, save=save, reasons=reasons)


@main.command()
@_recipe_command
@_RANKS
@_PLAN
@click.option(
    "--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps to train."
)
@click.option(
    "--float32", is_flag=True, help="In float32, which shows rounding; the criterion is float64's."
)
def check(recipe: Recipe, options: PlanOptions, steps: int, float32: bool) -> None:
    """Compare RECIPE on all ranks with one process on the global batch."""
    worst = worker.check(
        recipe, options, steps=steps, dtype=torch.float32 if float32 else torch.float64
    )
    if not float32 and not worst <= worker.CRITERION:
        click.echo(
            f"shoal: not the same as one process: {worst:.1e} is over {worker.CRITERION:.0e}",
            err=True,
        )
        sys.exit(1)


@main.command()
@_recipe_command
@_RANKS
@click.option(
    "--against", default="ddp", show_default=True, help="Peers, with commas: ddp, fsdp2, plain."
)
@_PLAN
@click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(2),
    help="Turns that each contender takes.",
)
@click.option(
    "--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps in a turn."
)
@click.option(
    "--json", "json_path", type=_NEW_FILE, callback=_in_a_folder, help="Write all figures there."
)
@click.option(
    "--trace",
    "trace_path",
    type=_NEW_FILE,
    callback=_in_a_folder,
    help="Write a Chrome trace of steps there.",
)
def bench(
    recipe: Recipe,
    options: PlanOptions,
    against: str,
    rounds: int,
    steps: int,
    json_path: Path | None,
    trace_path: Path | None,
) -> None:
    """Time RECIPE's step under Shoal and its peers, in turn, in one run."""
    peers = against.split(",")
    run_bench(
        recipe,
        options,
        peers,
        rounds=rounds,
        steps=steps,
        json_path=json_path,
        trace_path=trace_path,
    )


@main.command()
@_RANKS
def probe(workers: int | None) -> None:
    """Measure the links between the ranks."""
    _distributed(workers)
    worker.probe()


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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


def _bytes_per_s(rate: str) -> float:
    for unit, bits in _RATE_UNITS.items():
        number = rate.removesuffix(unit)
        if number != rate and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * bits / 8
    raise UsageError(
        "a rate is a number and kbit, mbit or gbit",
        got=rate,
        do="write for instance --rate 200mbit",
    )


if __name__ == "__main__":
    main()
