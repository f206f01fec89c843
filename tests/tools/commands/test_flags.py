"""The command line offers a flag for every option that has one, and its value reaches Options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest

from command_line import RECIPE
from shoal.contracts.feature import Feature
from shoal.core import registry
from shoal.core.errors import UsageError
from shoal.core.option import Flag, option, options_of
from shoal.core.registry import of
from shoal.features.local_steps import LocalSteps
from shoal.front.options import Options
from shoal.session.opening import Opening
from shoal_tools.commands import options as of_commands
from shoal_tools.commands.plan import plan
from shoal_tools.commands.train import train

pytestmark = pytest.mark.quick

LOCALLY = ["--local-steps", "4"]
FLAGS: dict[str, tuple[list[str], Callable[[Options], Any], Any]] = {
    "--pin": (["--pin", "0=factor"], lambda o: o.pins, {"0": "factor"}),
    "--strategy": (["--strategy", "sliced"], lambda o: o.strategies, ("sliced",)),
    "--placement": (["--placement", "hash"], lambda o: o.placement, "hash"),
    "--memory": (["--memory", "low"], lambda o: o.memory, "low"),
    "--weigh": (["--weigh", "ranks"], lambda o: o.weigh, "ranks"),
    "--memory-limit": (["--memory-limit", "2e9"], lambda o: o.memory_limit, 2e9),
    "--micro-batches": (["--micro-batches", "2"], lambda o: o.micro_batches, 2),
    "--codec": (["--codec", "int8"], lambda o: o.codecs, ("int8",)),
    "--accuracy": (["--accuracy", "near"], lambda o: asked(o).word, "near"),
    "--first": (["--first", "9"], lambda o: asked(o).first, 9),
    "--grow/--no-grow": ([*LOCALLY, "--grow"], lambda o: asked(o).outer.grows, True),
    "--check-every": (["--check-every", "7"], lambda o: asked(o).every, 7),
    "--local-steps": (LOCALLY, lambda o: asked(o).steps, 4),
    "--outer": ([*LOCALLY, "--outer", "slowmo"], lambda o: asked(o).outer.rule, "slowmo"),
    "--islands/--no-islands": (
        [*LOCALLY, "--no-islands"],
        lambda o: asked(o).outer.islands,
        False,
    ),
    "--warmup-steps": (
        [*LOCALLY, "--warmup-steps", "3"],
        lambda o: asked(o).outer.warmup_steps,
        3,
    ),
    "--replan": (["--replan"], lambda o: asked(o).on, True),
    "--schedule": (["--schedule", "1f1b"], lambda o: asked(o).order, "1f1b"),
    "--staleness": (["--staleness", "none"], lambda o: asked(o).steps, None),
    "--sync-batchnorm": (["--sync-batchnorm"], lambda o: asked(o).convert, True),
    "--update-every": (["--update-every", "0=2"], lambda o: asked(o).periods, {"0": 2}),
}


def asked(options: Options) -> Any:
    """The one feature that is asked for."""
    (feature,) = options.features
    return feature


def told() -> dict[str, bool]:
    """All flags as options declare them, each with whether it is one of every plan."""
    flags: list[Flag] = []
    for kind in (Options, *of(Feature).values()):
        for found in options_of(kind):
            inner = [o.flag for o in options_of(found.flag.record)] if _has_record(found) else []
            flags += filter(None, inner or [found.flag])
    return {f"{f.name}/--no-{f.name[2:]}" if f.no else f.name: f.plans for f in flags}


def _has_record(found: Any) -> bool:
    return found.flag is not None and found.flag.record is not None


def shown(command: click.Command) -> set[str]:
    """The flags that a command takes."""
    return {
        "/".join([*parameter.opts, *parameter.secondary_opts])
        for parameter in command.params
        if isinstance(parameter, click.Option)
    }


def given(*arguments: str, recipe: str | Path = RECIPE) -> Options:
    """The options that a command on a recipe gets."""
    found: list[Options] = []

    @click.command()
    @of_commands.recipe_command
    @of_commands.RANKS
    @of_commands.PLAN
    @of_commands.feature_options
    def command(recipe: Any, options: Options) -> None:
        found.append(options)

    command.main([str(recipe), *arguments], standalone_mode=False)
    return found[0]


def test_every_flag_has_its_row_here() -> None:
    assert FLAGS.keys() == told().keys()


def test_training_offers_all_flags_and_planning_those_of_plans() -> None:
    of_plans = {name for name, plans in told().items() if plans}
    assert told().keys() <= shown(train)
    assert shown(plan) & told().keys() == of_plans
    assert "--pin" in of_plans and "--check-every" not in of_plans


def test_nothing_is_asked_for_by_default() -> None:
    assert given() == Options()


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_reaches_the_options(flag: str) -> None:
    arguments, value_of, expected = FLAGS[flag]
    assert value_of(given(*arguments)) == expected


def test_several_texts_of_one_flag_are_one_value() -> None:
    options = given("--codec", "int8", "--codec", "top_k", "--pin", "0=factor", "--pin", "2=sliced")
    assert options.codecs == ("int8", "top_k")
    assert options.pins == {"0": "factor", "2": "sliced"}
    assert given("--codec", "all").codecs == "all"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--check-every", "often"],
        ["--local-steps", "0"],
        ["--micro-batches", "0"],
        ["--memory-limit", "-1"],
        ["--staleness", "some"],
        ["--update-every", "0"],
        ["--memory", "little"],
        ["--outer", "sgd"],
    ],
)
def test_a_text_that_says_nothing_is_told_with_its_flag(arguments: list[str]) -> None:
    with pytest.raises(click.BadParameter) as caught:
        given(*arguments)
    assert arguments[0] in caught.value.format_message()


def test_an_outer_rule_needs_local_steps() -> None:
    with pytest.raises(UsageError, match="there is an outer rule, and no local_steps"):
        given("--outer", "slowmo")


@dataclass(frozen=True)
class Toy(Feature[Opening]):
    """A feature with an option, as another package gives one."""

    name: ClassVar[str] = "toy_of_flags"
    every: int = option(
        1,
        keyword="toy_every",
        off=None,
        flag=Flag("Note norms every so many steps.", read=int, metavar="STEPS"),
    )


def test_a_feature_that_is_registered_has_its_flag() -> None:
    with registry.registered(Toy):
        assert given("--toy-every", "3").features == (Toy(3),)
        assert given() == Options()
        with pytest.raises(click.BadParameter) as caught:
            given("--toy-every", "often")
    assert "--toy-every" in caught.value.format_message()


def test_a_flag_wins_over_the_constant_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "recipe_with_a_constant.py"
    path.write_text(Path(RECIPE).read_text() + '\nOPTIONS = {"local_steps": 4}\n')
    assert asked(given(recipe=path)) == LocalSteps(4)
    assert asked(given("--local-steps", "8", recipe=path)) == LocalSteps(8)
