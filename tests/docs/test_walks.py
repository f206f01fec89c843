"""A walk's page and the code have the same numbers, and its names are names of the code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from pages import ROOT

SOURCES = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
WALKS = {  # the word that stands before its numbers in comments, and the page
    "batch": "walk-micro-batch",
    "gradient": "walk-gradient",
    "order": "walk-server-order",
    "save": "walk-checkpoint-save",
    "step": "walk-optimizer-step",
}
_ROW = re.compile(r"(?m)^(?:\| (\d+) \||(\d+)\. )")  # of a table, or of a list
_MOST_FILES = 12
_ROOMS = ("src/shoal", "tests")

pytestmark = pytest.mark.quick


def page(word: str) -> str:
    return (ROOT / "docs" / "ideas" / f"{WALKS[word]}.md").read_text()


def numbers_in_page(word: str) -> list[int]:
    """The numbers of its rows, in their order."""
    return [int(in_table or in_list) for in_table, in_list in _ROW.findall(page(word))]


def numbers_in(text: str, word: str) -> set[int]:
    """The numbers of a walk's comments in a source file, as the page's grep finds them."""
    return {int(number) for number in re.findall(rf"# {word} (\d+)", text)}


@cache
def members() -> dict[str, set[str]]:
    """The methods of every class, by the name of the class."""
    found: dict[str, set[str]] = {}
    for text in SOURCES.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
                found.setdefault(node.name, set()).update(names)
    return found


@pytest.mark.parametrize("word", WALKS)
def test_page_and_code_have_the_same_numbers(word: str) -> None:
    in_page = numbers_in_page(word)
    in_code = set[int]().union(*(numbers_in(text, word) for text in SOURCES.values()))
    assert in_page == list(range(1, len(in_page) + 1))
    assert in_code == set(in_page)


@pytest.mark.parametrize("word", WALKS)
def test_page_shows_the_command_that_lists_its_numbers(word: str) -> None:
    assert f'\ngrep -rnE "# {word} [0-9]" src\n' in page(word)


@pytest.mark.parametrize("word", WALKS)
def test_methods_and_files_on_the_page_exist(word: str) -> None:
    methods = re.findall(r"`(_?[A-Z]\w+)\.(\w+)`", page(word))
    assert methods
    lost = {f"{cls}.{name}" for cls, name in methods if name not in members().get(cls, ())}
    files = set(re.findall(r"\b\w+/\w+\.py\b", page(word)))
    lost |= {name for name in files if not any((ROOT / at / name).is_file() for at in _ROOMS)}
    assert not lost


def test_a_save_goes_through_few_files_which_its_page_lists() -> None:
    """One that the page does not list is one where a reader of the walk is lost."""
    intro = page("save").partition("\n| ")[0]
    listed = {ROOT / "src" / "shoal" / name for name in re.findall(r"`(\w+/\w+\.py)`", intro)}
    assert listed == {path for path, text in SOURCES.items() if numbers_in(text, "save")}
    assert len(listed) <= _MOST_FILES


def test_no_comment_has_a_number_of_any_walk() -> None:
    """`# walk 3` would be of which?"""
    assert not [path for path, text in SOURCES.items() if re.search(r"# walk \d", text)]
