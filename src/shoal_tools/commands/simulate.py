"""`shoal simulate`: whether more hosts are worth it, before you buy them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from shoal.core.errors import UsageError
from shoal.core.foresight import Network, Question
from shoal.core.numbers import MOST_RANKS_IMAGINED, whole
from shoal.front import text
from shoal.front.carriers import codecs_of
from shoal.front.options import AUTO, Options
from shoal.profiling.profile_file import Measured
from shoal_tools.commands import worker
from shoal_tools.commands.options import (
    CALL,
    CORES,
    LATENCY_US,
    NEW_FILE,
    REPORT,
    WORDS,
    Finite,
    bytes_per_s,
    in_a_folder,
)
from shoal_tools.commands.run_record import report_simulation
from shoal_tools.commands.script_model import ModelSource
from shoal_tools.report.foresight import foresight
from shoal_tools.simulate import simulate as foreseen

_MOST_OVERSUBSCRIBED = 10_000


def hosts_of(context: click.Context, option: click.Parameter, text: str) -> tuple[int, ...]:
    """Read numbers of hosts: "1,2,4,8", or "1..1024" for 1, 2, 4 … 1024."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = [whole(end) for end in re.split(r"\.\.", part.strip())]
        least, most = ends[0], ends[-1]
        if len(ends) > 2 or least is None or most is None or not 1 <= least <= most:
            raise click.BadParameter(f"{text!r} is no list of hosts; write 1,2,4,8 or 1..1024")
        if most > MOST_RANKS_IMAGINED:
            raise click.BadParameter(f"at most {MOST_RANKS_IMAGINED:,} hosts are simulated")
        number = least
        while number < most:
            numbers.append(number)
            number *= 2
        numbers.append(most)
        if len(ends) == 1 and numbers.count(most) > 1:
            raise click.BadParameter(f"{text!r} names {most} twice; write each number once")
    return tuple(sorted(set(numbers)))


@dataclass(frozen=True)
class SimulatedHosts:
    """Hosts of a simulation as the command line asks for them.

    Args:
        hosts: numbers of hosts, one for each answer.
        rate: rate of each host's link, as `tc` writes it; None: as measured.
        latency_us: microseconds that a message takes; None: as measured.
        cores_per_rank: processor cores of a rank; None: as measured.
        oversubscription: bandwidth of all hosts' links ÷ bandwidth between their switches.
        straggler: standard deviation of a host's step times, as a part of the step.
        strong: whether all hosts together have the rows of one.
        codec: names of codecs that plans may use, or "all" alone.
    """

    hosts: tuple[int, ...]
    rate: str | None
    latency_us: float | None
    cores_per_rank: float | None
    oversubscription: float
    straggler: float
    strong: bool
    codec: tuple[str, ...]

    def question(self) -> Question:
        """Return the question of these hosts to the simulation."""
        network = Network(
            None if self.rate is None else bytes_per_s(self.rate),
            None if self.latency_us is None else self.latency_us / 1e6,
            self.oversubscription,
            self.cores_per_rank,
        )
        codecs = codecs_of("all" if self.codec == ("all",) else self.codec)
        return Question(network, self.straggler, self.strong, tuple(codecs))


def limit_to_options(question: Question, options: Options) -> Question:
    """Return the question, limited to plans that keep to the options of a recipe or script."""
    how: dict[str, Any] = {
        "pins": options.pins,
        "strategies": options.strategies,
        "memory": options.memory,
        "memory_limit": options.memory_limit,
        "micro_batches": options.micro_batches,
    }
    if isinstance(options.placement, str):  # ranks by name fit one number of ranks only
        how["placement"] = options.placement
    given = {name: value for name, value in how.items() if value is not None}
    codecs = question.codecs or options.allowed_codecs
    return replace(question, how=given, codecs=codecs)


@click.command()
@click.argument("recipe", required=False)
@WORDS
@CALL
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="A profile that `shoal plan --save-profile` wrote, in place of RECIPE.",
)
@click.option(
    "--hosts",
    default="1,2,4,8",
    show_default=True,
    callback=hosts_of,
    help="How many: a list, or 1..1024 for 1, 2, 4 and so on.",
)
@click.option("--rate", help="Each host's link, as 10gbit; by default as measured, or 1gbit.")
@click.option("--latency-us", type=LATENCY_US, help="A message's; by default as measured, or 100.")
@click.option(
    "--cores-per-rank",
    type=CORES,
    help="By default as measured; below 2, lanes take compute time.",
)
@click.option(
    "--oversubscription",
    default=1.0,
    show_default=True,
    type=Finite(1, _MOST_OVERSUBSCRIBED),
    help="Hosts' links together, over what is between their switches.",
)
@click.option(
    "--straggler",
    default=0.02,
    show_default=True,
    type=Finite(0, 1),
    help="The standard deviation of a host's step times, as a part of the step.",
)
@click.option("--strong", is_flag=True, help="All hosts together have the rows of one, not each.")
@click.option("--codec", multiple=True, metavar="NAME", help="That plans may use; or all.")
@click.option(
    "--json",
    "path",
    type=NEW_FILE,
    callback=in_a_folder,
    help="Write the figures there.",
)
@REPORT
def simulate(
    recipe: str | None,
    words: tuple[str, ...],
    number: int | None,
    source: Path | None,
    path: Path | None,
    report: Path | None,
    **imagined: Any,
) -> None:
    """Foresee RECIPE's step on any number of hosts, and helpful changes.

    RECIPE is a recipe, or a script: it runs until its call of shoal.parallelize, and its model is
    taken. It may also be train.py:make, a function that returns parallelize's arguments as a dict.

    Under `shoal lab` or torchrun the links are measured too, and imagined ones are like them.

    For instance: shoal simulate examples/alexnet.py --hosts 1..64 --rate 10gbit
    """
    if (recipe is None) == (source is None):
        raise UsageError(
            "a simulation is of a recipe, or of a saved profile",
            got="both" if recipe else "neither",
            do="write shoal simulate RECIPE, or shoal simulate --from profile.json",
        )
    simulated = SimulatedHosts(**imagined)
    question, name = simulated.question(), source or Path()
    if source is not None:
        measured = Measured.load(source)
    elif recipe is not None:
        model = ModelSource(recipe, words, number)
        loaded, name = model.checked(), model.path
        options = Options.of({} if loaded is None else loaded.asked)
        if loaded is None:
            loaded = script = model.taken()
            options = script.given.options
        question = limit_to_options(question, options)
        # a given plan fits one number of ranks, and these are many numbers
        *_, measured = worker.measured(loaded, replace(options, plan=AUTO))
        if not worker.is_first():
            return
    answer = foreseen(measured.profile, measured.cluster, simulated.hosts, question)
    text.console().print(foresight(answer))
    if path:
        path.write_text(json.dumps(answer.to_json(), indent=1) + "\n", encoding="utf-8")
    if report:
        report_simulation(report, name, measured, answer)
