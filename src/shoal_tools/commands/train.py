"""`shoal train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from shoal.comm import rendezvous
from shoal.core.numbers import whole
from shoal.core.outer import RULES, Outer
from shoal.engine.replicas import EVERY
from shoal.front.recipe import Recipe
from shoal_tools.commands import worker
from shoal_tools.commands.launching import launching
from shoal_tools.commands.options import (
    EXPLAIN,
    NEW_FILE,
    PLAN,
    RANKS,
    REPORT,
    in_a_folder,
    recipe_command,
    seconds,
)
from shoal_tools.commands.worker import PlanOptions


def _steps_ahead(context: click.Context, option: click.Parameter, text: str) -> int | None:
    if text == "none":
        return None
    steps = whole(text)
    if steps is None:
        raise click.BadParameter(f'{text!r} is not a number of steps, nor "none"')
    return steps


def _local_steps(
    context: click.Context, option: click.Parameter, text: str | None
) -> int | str | None:
    if text is None or text == "auto":
        return text
    steps = whole(text)
    if not steps:
        raise click.BadParameter(f'{text!r} is not a number of steps above 0, nor "auto"')
    return steps


def _periods(
    context: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, int] | None:
    periods: dict[str, int] = {}
    for text in texts:
        name, _, steps = text.rpartition("=")
        if not name or (every := whole(steps)) is None:
            raise click.BadParameter(
                f"{text!r} is not LAYER=STEPS: write for instance --update-every 'classifier.*=4'"
            )
        periods[name] = every
    return periods or None


def _outer(rule: str | None, islands: bool | None, warmup_steps: int) -> Outer | None:
    if rule is None and islands is None and not warmup_steps:
        return None
    if rule is None:  # servers know one only
        rule = "average" if rendezvous.servers() else Outer.rule
    return Outer(rule=rule, islands=islands, warmup_steps=warmup_steps)


@click.command()
@launching
@recipe_command
@RANKS
@EXPLAIN
@PLAN
@click.option(
    "--staleness",
    default="0",
    show_default=True,
    metavar="STEPS",
    callback=_steps_ahead,
    help='With servers: how far a worker may run ahead; "none" for any number.',
)
@click.option(
    "--check-every",
    type=click.IntRange(0),
    default=EVERY,
    show_default=True,
    metavar="STEPS",
    help="From one comparison of the ranks' copies to the next; 0 for none.",
)
@click.option(
    "--local-steps",
    metavar="STEPS",
    callback=_local_steps,
    help='Steps that each rank makes by itself before all come together; "auto" for as many as '
    "hide the exchange. This changes the mathematics.",
)
@click.option(
    "--outer",
    "rule",
    type=click.Choice(sorted(RULES)),
    help="The rule by which ranks come together, with --local-steps.",
)
@click.option(
    "--islands/--no-islands",
    default=None,
    help="Whether the ranks of a host step together, with --local-steps. By default where there "
    "are several hosts.",
)
@click.option(
    "--warmup-steps",
    type=click.IntRange(0),
    default=0,
    metavar="STEPS",
    help="Exact steps of all ranks first, with --local-steps.",
)
@click.option(
    "--update-every",
    multiple=True,
    metavar="LAYER=STEPS",
    callback=_periods,
    help="Update layers of that name or glob once in so many steps, by the mean of these. This "
    "changes the mathematics.",
)
@click.option(
    "--replan",
    is_flag=True,
    help="Make the plan anew as epochs end, from what steps took and links carry; another one is "
    "followed where it is predicted to take a tenth less time.",
)
@click.option("--save-plan", type=NEW_FILE, callback=in_a_folder, help="Write the plan there.")
@click.option(
    "--epochs", type=click.IntRange(1), help="Passes over the data; the recipe's EPOCHS by default."
)
@click.option(
    "--steps",
    "--max-steps",
    "steps",
    type=click.IntRange(1),
    help="End after this many steps, however many passes they take.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Save the run there now and then, at its end, and on SIGTERM or Ctrl-C; go on from the "
    "newest checkpoint in it.",
)
@click.option(
    "--every",
    "every_s",
    default="10min",
    show_default=True,
    metavar="TIME",
    callback=seconds,
    help="From one checkpoint to the next, as 30s, 10min or 2h.",
)
@REPORT
@click.option(
    "--json",
    "json_path",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write there what steps took beside the prediction, and the plan.",
)
def train(
    recipe: Recipe,
    options: PlanOptions,
    staleness: int | None,
    check_every: int,
    local_steps: int | str | None,
    rule: str | None,
    islands: bool | None,
    warmup_steps: int,
    update_every: dict[str, int] | None,
    replan: bool,
    save_plan: Path | None,
    epochs: int | None,
    steps: int | None,
    checkpoint: Path | None,
    every_s: float,
    report: Path | None,
    json_path: Path | None,
    reasons: bool,
) -> None:
    """Train RECIPE, after showing its plan."""
    worker.train(
        recipe,
        replace(
            options,
            staleness=staleness,
            check_every=check_every,
            local_steps=local_steps,
            outer=_outer(rule, islands, warmup_steps),
            update_every=update_every,
            replan=replan,
        ),
        save=save_plan,
        epochs=epochs,
        max_steps=steps,
        checkpoint=checkpoint,
        every_s=every_s,
        reasons=reasons,
        report=report,
        json_path=json_path,
    )
