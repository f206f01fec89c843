"""Options that commands share, and what every command on a recipe does first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shoal.comm import rendezvous
from shoal.core.buckets import MEMORY
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS_HERE, decimal
from shoal.core.placement import BALANCED, POLICIES
from shoal.core.plan import MICRO_BATCHES
from shoal.front.recipe import load
from shoal_tools.commands.launching import Launching, distributed
from shoal_tools.commands.worker import PlanOptions


class Finite(click.FloatRange):
    """A number in a range, and neither nan nor inf."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", parameter, context)
        return number


NEW_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
PLAN = click.option("--plan", default="auto", help='A saved plan\'s path, or "auto".')
RANKS = click.option(
    "--ranks",
    "--workers",
    "-w",
    "workers",
    type=click.IntRange(1, MOST_RANKS_HERE),
    help="Start this many ranks on this machine (--workers is the old name).",
)
EXPLAIN = click.option(
    "--explain",
    "reasons",
    is_flag=True,
    help="Say of each layer what else was compared, and why.",
)
WEIGHTS = click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="Of the model: a folder of `shoal train --checkpoint`, one of its checkpoints, a file of "
    "safetensors, or of torch.save(model.state_dict()).",
)
_OF_PLAN = [
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
        type=Finite(0, min_open=True),
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
    click.option(
        "--codec",
        multiple=True,
        metavar="NAME",
        help="Let the planner send fewer bytes so, not exactly, where it pays; or all.",
    ),
    click.option(
        "--sync-batchnorm",
        is_flag=True,
        help="Let BatchNorm layers normalise by the rows of all ranks, as SYNC_BATCHNORM = True in "
        "the recipe does.",
    ),
]
_TIME_UNITS = {"min": 60.0, "h": 3600.0, "s": 1.0}
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    """A time as people write it, in seconds."""
    for unit, unit_s in _TIME_UNITS.items():
        number = decimal(text.removesuffix(unit).strip()) if text.endswith(unit) else None
        if number:
            return number * unit_s
    raise click.BadParameter(f"{text!r} is no time; write for instance 30s, 10min or 2h")


def in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse, before any work, a file that cannot be written when the work is done."""
    # who writes it
    if path is not None and rendezvous.is_first() and not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent}",
            got=f"{option.opts[0]} {path}",
            do="make the folder first",
        )
    return path


REPORT = click.option(
    "--report",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write a page of HTML there; where it ends in .json, what `shoal report` draws one of.",
)


def recipe_command(function: Callable[..., None]) -> Callable[..., None]:
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
        codec: tuple[str, ...],
        sync_batchnorm: bool,
        plan: str = "auto",
        by: Launching | None = None,
        **own: Any,
    ) -> None:
        loaded = load(recipe)
        pins = _pins(pin) or None
        options = PlanOptions(
            plan,
            pins,
            strategy or None,
            memory,
            placement,
            memory_limit,
            micro_batches,
            codecs="all" if codec == ("all",) else codec,
            sync_batchnorm=sync_batchnorm or loaded.sync_batchnorm,
        )
        by = by or Launching()
        sent = (recipe, *by.files, *(() if plan == "auto" else (Path(plan),)))
        distributed(workers, replace(by, files=sent))
        function(loaded, options, **own)

    for option in reversed([RECIPE, *_OF_PLAN]):
        command = option(command)
    return command


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


def bytes_per_s(rate: str) -> float:
    """A rate as it is written for `tc`, in bytes per second (UsageError if it is none)."""
    for unit, bits in _RATE_UNITS.items():
        number = decimal(rate.removesuffix(unit)) if rate.endswith(unit) else None
        if number:
            return number * bits / 8
    raise UsageError(
        "a rate is a number and kbit, mbit or gbit",
        got=rate,
        do="write for instance --rate 200mbit",
    )
