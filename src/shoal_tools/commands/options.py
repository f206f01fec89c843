"""Options that commands share, and the first steps of every command on a recipe.

Most flags are defined with the options that they set (`shoal.core.option.Flag`), in
front/options.py and in features/. Here they become options of click.
"""

from __future__ import annotations

import difflib
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
from shoal.core.numbers import (
    MOST_COUNTED,
    MOST_RANKS,
    MOST_RANKS_HERE,
    MOST_SECONDS,
    decimal,
)
from shoal.core.option import Flag, Option, options_of
from shoal.core.registry import of
from shoal.front.options import AUTO, Options
from shoal.front.recipe import load
from shoal_tools.commands.launch_options import Launching, distributed
from shoal_tools.commands.script_model import ModelSource, with_flags


class Finite(click.FloatRange):
    """A number in a range, and neither nan nor inf."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        number = click.FLOAT.convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", parameter, context)
        return super().convert(value, parameter, context)


class NamedPath(click.Path):
    """A path. An empty text is an error, because it would mean the working folder.

    Args:
        stores: whether it may be the address of a store, which stays a text.
        options: the options of `click.Path`.
    """

    def __init__(self, *, stores: bool = False, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self._stores = stores

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        if value == "":
            self.fail("the path is empty", parameter, context)
        if "\0" in str(value):
            self.fail("no path has a NUL in it", parameter, context)
        if isinstance(value, str) and "://" in value:
            if self._stores:
                return value
            self.fail("it is an address, and a path on this host is needed", parameter, context)
        return super().convert(value, parameter, context)


class FiniteEach(Finite):
    """A finite number in a range, or several with commas between them."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> Any:
        texts = value.split(",") if isinstance(value, str) else [value]
        numbers = [super(FiniteEach, self).convert(text, parameter, context) for text in texts]
        return numbers if len(numbers) > 1 else numbers[0]


COUNT = click.IntRange(1, MOST_COUNTED)
LATENCY_US = Finite(0, 1e8)
CORES = Finite(0.001, MOST_RANKS)
NEW_FILE = NamedPath(dir_okay=False, writable=True)
RECIPE = click.argument("recipe", type=click.Path(path_type=Path))
MODEL = click.argument("recipe")
WORDS = click.argument("words", nargs=-1, metavar="[-- ARGS]...")
CALL = click.option(
    "--call",
    "number",
    type=click.IntRange(1, MOST_COUNTED),
    metavar="NUMBER",
    help="Of a script that calls parallelize often: the call that is taken.",
)
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
    type=NamedPath(),
    help="Weights of the model: a folder of `shoal train --checkpoint`, one of its checkpoints, a "
    "file of safetensors, or of torch.save(model.state_dict()).",
)
WAIT_FOR = click.option(
    "--wait-for",
    "wait_s",
    default=600.0,
    show_default=True,
    type=Finite(0, MOST_SECONDS),
    help="Seconds to wait for hosts while there are too few, or for the meeting place.",
)
LOST_AFTER = click.option(
    "--lost-after",
    "lost_after_s",
    default=20.0,
    show_default=True,
    type=Finite(3, MOST_SECONDS),
    help="Seconds without a sign of life after which a host is lost.",
)
_TIME_UNITS = {"min": 60.0, "h": 3600.0, "s": 1.0}
_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_RATE, _MOST_RATE = 1.0, 1e15  # bits a second
_Key = tuple[str, str]  # an option's keyword, and a field of the option's record, or ""
_FILES = "shoal.files"  # key in click's context: flags by the file that each writes
_GIVEN = "shoal.given"  # key in click's context: values of the flags on the command line, by _Key


def seconds(context: click.Context, option: click.Parameter, text: str) -> float:
    """Read a time as people write it, in seconds."""
    for unit, unit_s in _TIME_UNITS.items():
        number = decimal(text.removesuffix(unit).strip()) if text.endswith(unit) else None
        if number and number * unit_s <= MOST_SECONDS:
            return number * unit_s
    raise click.BadParameter(f"{text!r} is no time; write for instance 30s, 10min or 2h")


def in_a_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Raise UsageError, before any work, if a file could not be written after the work."""
    if path is None:
        return None
    flag = option.opts[0]
    if not path.name:
        raise UsageError(f"{flag} has no file's name", got=str(path), do=f"write {flag} FILE")
    other = context.meta.setdefault(_FILES, {}).setdefault(path.absolute(), flag)
    if other != flag:
        raise UsageError(
            f"{other} and {flag} would write over each other", got=str(path), do="write two names"
        )
    # only the first rank writes files
    if rendezvous.is_first() and not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent}",
            got=f"{option.opts[0]} {path}",
            do="make the folder first",
        )
    return path


def check_script(word: str, command: str) -> None:
    """Refuse a word in a script's place that is no script: a command's options come before it.

    Raises:
        UsageError: it is an option that the command does not have, or a folder.
    """
    if word.startswith("-") and word != "-m":
        known = [name for each in click.get_current_context().command.params for name in each.opts]
        near = difflib.get_close_matches(word, known, n=1)
        behind = f"write an option of the script behind its name: {command} … script.py {word}"
        raise UsageError(
            f"{command} has no option {word}",
            do=f"did you mean {near[0]}? Or {behind}" if near else behind,
        )
    if Path(word).is_dir():
        raise UsageError(
            "the script is a folder", got=word, do="give a file, or -m and the name of a module"
        )


def ending_in(*endings: str) -> Callable[..., Path | None]:
    """Make the callback of a flag that takes a file with one of these endings, as ".html"."""

    def checked(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        path = in_a_folder(context, option, path)
        if path is not None and path.suffix.lower() not in endings:
            raise UsageError(
                f"{option.opts[0]} ends in {' or '.join(endings)}, which says the format",
                got=str(path),
                do=f"write {option.opts[0]} {path.with_suffix(endings[0])}",
            )
        return path

    return checked


REPORT = click.option(
    "--report",
    type=NEW_FILE,
    callback=ending_in(".html", ".htm", ".json"),
    help="Write a page of HTML there; where it ends in .json, what `shoal report` draws one of.",
)


def recipe_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command on a recipe: it loads the recipe, reads the options and starts the ranks.

    Args:
        function: called on every rank with the recipe, the options, and the command's own flags by
            name.
    """

    @functools.wraps(function)
    def command(
        recipe: Path,
        workers: int | None,
        plan: str = AUTO,
        by: Launching | None = None,
        **own: Any,
    ) -> None:
        loaded = load(recipe)
        options = Options.of(with_plan({**loaded.asked, **_asked()}, plan))
        _start(recipe, workers, plan, by)
        function(loaded, options, **own)

    return RECIPE(_with_flags(command, plans=True))


def model_command(
    *, compares: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make the decorator of a command on a recipe, or on a script's model.

    Args:
        compares: whether the command makes several copies of a script's model, and compares them.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(
            recipe: str,
            words: tuple[str, ...],
            number: int | None,
            workers: int | None,
            plan: str = AUTO,
            by: Launching | None = None,
            **own: Any,
        ) -> None:
            source = ModelSource(recipe, words, number)
            loaded, given = source.checked(), with_plan(_asked(), plan)
            options = Options.of({} if loaded is None else {**loaded.asked, **given})
            _start(source.path, workers, plan, by)
            if loaded is None:
                loaded = script = source.taken(compares=compares)
                options = with_flags(script.given.options, given)
            function(loaded, options, **own)

        for argument in (CALL, WORDS, MODEL):
            command = argument(command)
        return _with_flags(command, plans=True)

    return decorate


def with_plan(asked: Mapping[str, Any], plan: str) -> dict[str, Any]:
    """Return options with the plan of the command line, if one is given there."""
    return {**asked, **({} if plan == AUTO else {"plan": plan})}


def _start(recipe: Path, workers: int | None, plan: str, by: Launching | None) -> None:
    """Start the ranks, if this process must; return if it is a rank."""
    by = by or Launching()
    sent = (recipe, *by.files, *(() if plan == AUTO else (Path(plan),)))
    distributed(workers, replace(by, files=sent))


def feature_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that only training has."""
    return _with_flags(function, plans=False)


def _options() -> list[Option]:
    """List all options: of a plan, and of each feature.

    Features of other packages (entry points) are included. A feature that a recipe registers is
    not, because flags are read before the recipe is loaded. The recipe sets its options in OPTIONS.
    """
    return [option for kind in (Options, *of(Feature).values()) for option in options_of(kind)]


def _with_flags(function: Callable[..., None], *, plans: bool) -> Callable[..., None]:
    """Add the flags of all commands that make a plan, or only the flags of training."""
    flags: list[tuple[_Key, Flag]] = []
    for option in _options():
        if option.flag is None:
            continue
        if option.flag.record is None:
            flags.append(((option.keyword, ""), option.flag))
            continue
        for field in options_of(option.flag.record):
            if field.flag is not None:
                flags.append(((option.keyword, field.name), field.flag))
    for key, flag in reversed(flags):
        if flag.plans == plans:
            function = _click_option(key, flag)(function)
    return function


def _click_option(key: _Key, flag: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make click's option of a flag. Its value goes to click's context, where `_asked` finds it."""

    def keep(context: click.Context, option: click.Parameter, text: Any) -> None:
        if text is None or text == ():
            return  # the flag is not given
        try:
            value = text if flag.read is None else flag.read(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
        context.meta.setdefault(_GIVEN, {})[key] = value

    keyword, field = key
    name = flag.name or "--" + (field or keyword).replace("_", "-")
    form: dict[str, Any] = {"is_flag": True}
    if flag.read is not None:
        choices = click.Choice(flag.choices) if flag.choices else None
        form = {"multiple": flag.many, "type": choices, "metavar": flag.metavar or None}
    return click.option(
        f"{name}/--no-{name[2:]}" if flag.no else name,
        default=None,
        callback=keep,
        expose_value=False,
        help=flag.help,
        **form,
    )


def _asked() -> dict[str, Any]:
    """Return the values of the flags on the command line, by keyword of `parallelize`."""
    given: dict[_Key, Any] = click.get_current_context().meta.get(_GIVEN, {})
    asked = {keyword: value for (keyword, field), value in given.items() if not field}
    for option in _options():
        if option.flag is None or option.flag.record is None:
            continue
        fields = {field: v for (keyword, field), v in given.items() if keyword == option.keyword}
        if fields:
            asked[option.keyword] = (option.flag.make or option.flag.record)(**fields)
    return asked


def bytes_per_s(rate: str) -> float:
    """Read a rate in the form of `tc`, in bytes per second. UsageError if it is no rate."""
    for unit, bits in _RATE_UNITS.items():
        number = decimal(rate.removesuffix(unit)) if rate.endswith(unit) else None
        if number and _LEAST_RATE <= number * bits <= _MOST_RATE:
            return number * bits / 8
    raise UsageError(
        "a rate is a number and kbit, mbit or gbit, up to a million gbit",
        got=rate,
        do="write for instance --rate 200mbit",
    )
