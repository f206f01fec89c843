"""What pages say of the code, where a test can look: each kind that there is, and its numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal
from shoal.contracts.codec import Codec
from shoal.contracts.exchange import Exchange
from shoal.contracts.strategy import Strategy
from shoal.core.registry import of
from shoal.engine.replicas import EVERY
from shoal_tools.cli import main

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


def test_no_page_says_that_there_are_no_codecs() -> None:
    assert len(own(Codec)) == 7
    assert "Seven are built in" in page("docs/lab/decisions.md")


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
