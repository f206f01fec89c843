"""Options that commands share, and what every command on a recipe does first."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shoal.comm import rendezvous
from shoal.contracts.feature import Feature
from shoal.core.errors import UsageError
from shoal.core.numbers import MOST_RANKS_HERE, decimal
from shoal.core.option import Flag, options_of
from shoal.core.registry import of
from shoal.front.options import AUTO, Options
from shoal.front.recipe import load
from shoal_tools.commands.launching import Launching, distributed


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
PLAN = click.option("--plan", default=AUTO, help='A saved plan\'s path, or "auto".')
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
    """A command on a recipe: called on every rank, with the recipe and the options of its plan
    before its own.
    """

    @functools.wraps(function)
    def command(
        recipe: Path,
        workers: int | None,
        plan: str = AUTO,
        by: Launching | None = None,
        **given: Any,
    ) -> None:
        loaded = load(recipe)
        own = {name: value for name, value in given.items() if name not in _PARAMETERS}
        asked = _asked({name: given[name] for name in given.keys() - own.keys()})
        options = Options.of({**loaded.asked, **asked, "plan": plan})
        by = by or Launching()
        sent = (recipe, *by.files, *(() if plan == AUTO else (Path(plan),)))
        distributed(workers, replace(by, files=sent))
        function(loaded, options, **own)

    decorated: Callable[..., None] = command
    decorators: list[Any] = [RECIPE, *_click_options(plans=True)]
    for option in reversed(decorators):
        decorated = option(decorated)
    return decorated


def feature_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of features that only training has."""
    for option in reversed(_click_options(plans=False)):
        function = option(function)
    return function


def _flags() -> dict[str, tuple[str, Flag]]:
    """All flags by the name of their parameter, each with the keyword that it is of.

    A record within a feature has a parameter for each of its fields: "outer__rule".
    """
    found: dict[str, tuple[str, Flag]] = {}
    for kind in (Options, *of(Feature).values()):
        for option in options_of(kind):
            if option.flag is None:
                continue
            if option.flag.record is None:
                found[option.keyword] = option.keyword, option.flag
                continue
            for field in options_of(option.flag.record):
                if field.flag is not None:
                    found[f"{option.keyword}__{field.name}"] = option.keyword, field.flag
    return found


_PARAMETERS = _flags()
_UNSAID = object()


def _click_options(*, plans: bool) -> list[Callable[[Callable[..., None]], Callable[..., None]]]:
    """Those that every command with a plan has, or the others."""
    shown = {name: flag for name, (_, flag) in _PARAMETERS.items() if flag.plans == plans}
    return [_click_option(name, flag) for name, flag in shown.items()]


def _click_option(
    parameter: str, flag: Flag
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A flag as click has it; _UNSAID where it is not given, as None may be what it says."""
    name = flag.name or "--" + parameter.replace("_", "-")
    read = flag.read

    def value(context: click.Context, option: click.Parameter, text: Any) -> Any:
        if text is None or text == ():
            return _UNSAID
        if flag.no or read is None:
            return text
        try:
            return read(text)
        except UsageError:
            raise
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    if flag.no:
        both = f"{name}/--no-{name[2:]}"
        return click.option(both, parameter, default=None, callback=value, help=flag.help)
    if read is None:
        return click.option(
            name, parameter, is_flag=True, default=None, callback=value, help=flag.help
        )
    return click.option(
        name,
        parameter,
        multiple=flag.many,
        type=click.Choice(flag.choices) if flag.choices else None,
        metavar=flag.metavar or None,
        callback=value,
        help=flag.help,
    )


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the flags ask for, by keyword of `parallelize`."""
    asked: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for parameter, value in given.items():
        keyword, _, field = parameter.partition("__")
        if value is _UNSAID:
            continue
        if field:
            parts.setdefault(keyword, {})[field] = value
        else:
            asked[keyword] = value
    for kind in of(Feature).values():
        for option in options_of(kind):
            if option.keyword in parts and option.flag and option.flag.record:
                asked[option.keyword] = (option.flag.make or option.flag.record)(
                    **parts[option.keyword]
                )
    return asked


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
