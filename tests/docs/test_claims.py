"""What pages say of the code, where a test can look: each kind that there is, and its numbers."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import shoal
from shoal.comm import other_launchers
from shoal.contracts.codec import Codec, LinearCodec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.registry import of
from shoal.engine.replicas import EVERY
from shoal.planner.options import resolve
from shoal_tools.cli import main
from shoal_tools.doctor import meet
from shoal_tools.elastic import place
from shoal_tools.report.peer_words import as_ddp

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def own(kind: type) -> list[str]:
    """The names of Shoal's own kinds of a contract, without those of other tests."""
    return [name for name, found in of(kind).items() if found.__module__.startswith("shoal.")]


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("docs/guide/choosing.md", Strategy),
        ("docs/reference/glossary.md", Strategy),
        ("docs/ideas/how-it-chooses.md", Strategy),
        ("docs/reference/glossary.md", Exchange),
        ("docs/guide/codecs.md", Codec),
    ],
)
def test_a_page_that_lists_a_kind_lists_all_of_it(path: str, kind: type) -> None:
    table = "\n".join(rows_of(page(path)))
    pairs = {"column_pair": "pairs", "row_pair": "pairs"}
    missing = [
        name
        for name in own(kind)
        if f"`{name}`" not in table and pairs.get(name, "?") not in table and name != "nothing"
    ]
    assert not missing


def test_codecs_have_the_bounds_of_their_table() -> None:
    bounds: dict[str, float] = {}
    for row in rows_of(page("docs/guide/codecs.md").partition("## Who chooses")[0]):
        *names, bound = [part.strip() for part in row.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", names[0]):
            bounds[name] = float(bound)
    assert bounds == {name: of(Codec)[name].most_error for name in own(Codec)}


def test_codecs_have_the_prices_of_their_table() -> None:
    prices: dict[str, float] = {}
    page_of_prices = page("docs/guide/codecs.md").partition("## What it costs in accuracy")[2]
    for row in rows_of(page_of_prices.partition("##")[0]):
        names, *_, price = [part.strip() for part in row.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", names):
            prices[name + " added" * ("all-reduce" in names)] = float(price)
    kinds = {name: of(Codec)[name] for name in own(Codec)}
    expected = {name: kind.learning.times for name, kind in kinds.items()}
    added = {n: k.learning_added for n, k in kinds.items() if issubclass(k, LinearCodec)}
    assert prices == expected | {f"{name} added": price.times for name, price in added.items()}
    assert all(kind.learning.source for kind in kinds.values())


def test_no_page_says_that_there_are_no_codecs() -> None:
    assert len(own(Codec)) == 8
    assert "Eight are built in" in page("docs/lab/decisions.md")


def test_pages_agree_on_the_optimizer_under_a_staleness() -> None:
    said = page("docs/start/saving-and-evaluating.md")
    assert "no optimizer state to save" not in said
    for text in (said, page("docs/guide/servers.md")):
        assert re.search(r"`optimizer\.state_dict\(\)` is refused\. `shoal\.save`", text)


def test_the_front_page_names_targets_that_there_are() -> None:
    targets = re.findall(r"^([a-z][\w-]*):", page("Makefile"), re.MULTILINE)
    named = re.findall(r"^make ([\w-]+)", page("README.md"), re.MULTILINE)
    assert {"demo", "test", "lab"} <= set(named) <= set(targets)


def test_the_command_line_page_shows_every_command() -> None:
    text = page("docs/reference/command-line.md")
    assert not [name for name in main.commands if f"shoal {name} " not in text]


def test_defaults_are_those_that_pages_give() -> None:
    assert f"every {EVERY} backwards" in page("docs/guide/replicas.md").lower()
    rules = {row.split("|")[1].strip(): row for row in rows_of(page("docs/guide/local-steps.md"))}
    for rule in ("nesterov", "average", "slowmo"):
        outer = shoal.Outer(rule=rule)
        momentum = f"{outer.momentum:g}" if outer.momentum else "none"
        assert re.search(rf"\| {outer.lr:g} \| {momentum} \|", rules[f'`"{rule}"`'])


NUMBERS: list[tuple[str, str, str, object]] = [
    ("docs/guide/cut-layers.md", "at least 5 % shorter", "shoal.planner.search.CUT_WORTH", 0.05),
    ("docs/guide/cut-layers.md", "1 MiB", "shoal.planner.options._LEAST_CUT_BYTES", 1 << 20),
    ("docs/guide/cut-layers.md", "20 ms", "shoal.planner.options._LEAST_CUT_S", 0.02),
    ("docs/guide/codecs.md", "10 % shorter", "shoal.planner.lossy_plans.WORTH", 0.1),
    ("docs/guide/codecs.md", "Every 100 steps", "shoal.codecs.ledger.WINDOW", 100),
    ("docs/guide/replan.md", "shorter by a tenth", "shoal.front.replan._WORTH", 0.1),
    ("docs/guide/replan.md", "fewer than three steps", "shoal.front.replan._FEWEST", 3),
    ("docs/guide/second-start.md", "1.7 times as much", "shoal.profiling.links._ALIKE", 1.7),
    ("docs/guide/second-start.md", "1.7 times the proc", "shoal.profiling.steps._ALIKE", 1.7),
    (
        "docs/ideas/how-it-chooses.md",
        "It must be 5 % faster",
        "shoal.planner.simpler_plans.LEAD",
        0.05,
    ),
    (
        "docs/ideas/how-it-chooses.md",
        "10 % on one host",
        "shoal.planner.simpler_plans.LEAD_ON_FAST",
        0.1,
    ),
    ("docs/guide/replicas.md", "three checks in a row", "shoal.engine.replicas._PATIENCE", 3),
    ("docs/guide/report.md", "three steps after five", "shoal_tools.commands.run_record._STEPS", 3),
    ("docs/guide/stragglers.md", "every three seconds", "shoal.engine.stragglers._WINDOW_S", 3.0),
    ("docs/guide/stragglers.md", "half as long again", "shoal.engine.stragglers._SLOWER", 1.5),
    ("docs/guide/doctor.md", "port 29490", "shoal_tools.doctor.meet.PORT", 29490),
    ("docs/guide/doctor.md", "fewer than 1024 files", "shoal_tools.doctor.checks_host.FILES", 1024),
    ("docs/guide/data.md", "Every 16 steps", "shoal.data.shares._EVERY", 16),
    ("docs/guide/owners-and-memory.md", "a fifth of the model", "shoal.planner.search._LOW", 0.2),
    ("docs/guide/local-steps.md", "5 % longer", "shoal.planner.local._WORK", 0.05),
    ("docs/guide/large-batches.md", "k is 512 at most", "shoal.core.plan.MOST_STEPS", 512),
]


@pytest.mark.parametrize(("path", "said", "name", "number"), NUMBERS)
def test_a_number_of_a_page_is_that_of_the_code(
    path: str, said: str, name: str, number: object
) -> None:
    assert said in page(path)
    module, _, constant = name.rpartition(".")
    assert getattr(import_module(module), constant) == number


def test_of_two_pins_that_match_the_later_one_counts() -> None:
    assert "the later one counts" in page("docs/guide/choosing.md")
    layers = ["hidden", "head"]
    general_first = resolve({"*": "sliced", "head": "factor"}, layers)
    assert general_first == {"hidden": ("sliced", ""), "head": ("factor", "")}
    general_last = resolve({"head": "factor", "*": "sliced"}, layers)
    assert general_last == dict.fromkeys(layers, ("sliced", ""))


def test_the_firewall_of_the_page_covers_every_port_that_pages_name() -> None:
    (rule,) = re.findall(r"tcp dport \{ (.+) \} drop", page("docs/guide/security.md"))
    spans = [[int(end) for end in span.split("-")] for span in rule.split(", ")]
    (first, many) = map(
        int,
        re.findall(r"PORT=\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)", page("docs/guide/slurm.md"))[0],
    )
    least, number = other_launchers._PORTS
    torchrun = int(other_launchers._USUAL_PORT)
    named = [(first, first + many - 1), (least, least + number - 1), (torchrun, torchrun)]
    named += [(meet.PORT, meet.PORT), (place.PORT, place.PORT), (32768, 60999)]
    for low, high in named:
        assert any(span[0] <= low and high <= span[-1] for span in spans), (low, high)
    table = page("docs/guide/security.md").partition("## Ports")[2].partition("###")[0]
    for low, high in named[:2]:
        assert f"{low} to {high}" in table


def test_a_comment_of_a_command_hides_no_other_command() -> None:
    """Two lines that were joined would leave the second one in the comment of the first."""
    starts = r"#.*\b(pip install|python -m|torchrun --|shoal (train|run|lab) )"
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for kind, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", path.read_text()):
            lines = block.splitlines() if kind in ("", "sh", "bash") else []
            assert not [line for line in lines if re.search(starts, line)], path.name


def test_the_line_about_ddp_is_the_one_that_is_printed() -> None:
    """The page shows where to read how much is gained over DDP."""
    said, _, _ = as_ddp(1.0, 2.0).partition(" 2.00")
    assert said.startswith("DDP") and said in page("docs/guide/simulate.md")
