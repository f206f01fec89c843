"""Plain English, measured: README, pages, docstrings of public names, and error messages.

A page's sentences have 18 words on average and none has more than 35. In 100 sentences there are 5
semicolons at most. What is code, a table or a heading is not counted.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

import shoal

ROOT = Path(__file__).parents[2]
# The lab book records what was measured and decided, figure by figure: it is not held to this.
FIGURES = "benchmarks", "cut-layers", "exchanges", "memory-and-faults", "other-hosts"
BOOK = {ROOT / "docs" / "lab" / f"{name}.md" for name in (*FIGURES, "decisions", "tried")}
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - BOOK)
MEAN, LONGEST, SEMICOLONS = 18, 35, 0.05
_FEW = 12  # sentences of which a mean says something

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Prose:
    """Sentences of one text, and its semicolons."""

    sentences: tuple[str, ...]
    semicolons: int

    @classmethod
    def of(cls, text: str) -> Prose:
        """What is to be read as prose in a page of Markdown, or in a docstring."""
        paragraphs = [" ".join(block.split()) for block in _blocks(text)]
        sentences = [
            sentence
            for paragraph in paragraphs
            for sentence in re.split(r"(?<=[.!?:])\s+", paragraph)
            if len(_words(sentence)) > 1
        ]
        return cls(tuple(sentences), sum(paragraph.count(";") for paragraph in paragraphs))

    def too_long(self) -> list[str]:
        """Its sentences of more words than any may have."""
        return [sentence for sentence in self.sentences if len(_words(sentence)) > LONGEST]

    def check(self) -> None:
        """Fail where it is not plain."""
        assert not self.too_long()
        if len(self.sentences) >= _FEW:
            assert mean(len(_words(sentence)) for sentence in self.sentences) <= MEAN
            assert self.semicolons <= max(1, SEMICOLONS * len(self.sentences))


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs and items of lists, without code, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.S | re.M)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        is_item = re.match(r"([*+-]|\d+\.)\s", stripped)
        is_prose = stripped and not stripped.startswith(("|", "#", "<", "![", ">>>", "..."))
        if block and (not is_prose or is_item):
            yield " ".join(block)
            block = []
        if is_prose:
            block.append(re.sub(r"^([*+-]|\d+\.)\s+", "", stripped))


def _words(sentence: str) -> list[str]:
    """Words, of which code in backquotes and the address of a link are one each."""
    sentence = re.sub(r"`[^`]*`", "code", sentence)
    sentence = re.sub(r"\]\([^)]*\)", "]", sentence)
    return re.findall(r"[\w'’.,/%-]*\w[\w'’.,/%-]*", sentence)


def _docstrings() -> Iterator[tuple[str, str]]:
    """Public functions and classes of the package, and their public methods."""
    for name in shoal.__all__:
        value = getattr(shoal, name)
        yield name, inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", inspect.getdoc(function) or ""


@cache
def _messages() -> tuple[tuple[str, str], ...]:
    """Texts that errors are made of, with where they stand."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _is_error(node.func):
                parts = [*node.args, *(k.value for k in node.keywords if k.arg in ("do", "what"))]
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                found += [(where, text) for part in parts if (text := _text(part))]
    return tuple(found)


def _is_error(function: ast.expr) -> bool:
    name = function.id if isinstance(function, ast.Name) else ""
    return name.endswith(("Error", "Differ", "Differs", "Lost", "Rank", "Passed"))


def _text(node: ast.expr) -> str:
    """A string as it stands in the code; what is filled in counts as a word."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "it" for part in node.values
        )
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    Prose.of(page.read_text()).check()


@pytest.mark.parametrize(
    ("name", "text"), [*_docstrings()], ids=[name for name, _ in _docstrings()]
)
def test_docstrings(name: str, text: str) -> None:
    Prose.of(re.sub(r"^Examples:.*", "", text, flags=re.S | re.M)).check()


def test_messages_of_errors() -> None:
    assert len(_messages()) > 100
    long = {where: text for where, text in _messages() if Prose.of(text).too_long()}
    assert not long
    semicolons = sum(text.count(";") for _, text in _messages())
    assert semicolons <= SEMICOLONS * len(_messages())


def test_what_is_measured() -> None:
    items = "* an item\n* another one [here](x;y)"
    plain = f"You say `a; b` so. It is short:\n\n{items}\n\n```\ncode; code\n```\n"
    assert Prose.of(plain).sentences == (
        "You say `a; b` so.",
        "It is short:",
        "an item",
        "another one [here](x;y)",
    )
    with pytest.raises(AssertionError):
        Prose.of("word " * 36 + ".").check()
    with pytest.raises(AssertionError):
        Prose.of("This one has; two; of them. " * 12).check()
