"""Plain English, measured: README, pages, docstrings of public names, and error messages.

A page's sentences have 18 words on average and none has more than 35. In 100 sentences there are 5
semicolons at most. Code, tables and headings are not counted.

The users' pages together have few of the words "what", "who", "whose" and "those", because these
words mostly stand for a noun that is missing. Their number may only fall.
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

# "what", "who", "whose" and "those" in 1,000 words of the users' pages; lower it when it has fallen
RARE_IN_1000 = 0.7
_PLAY = 0.8  # a rate below this share of RARE_IN_1000 has to be written there
_RARE = re.compile(r"\b(what|who|whose|those)\b", re.IGNORECASE)
USERS = [page for page in PAGES if page.parent.name in ("guide", "extend", "start")]

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


def _plain(text: str) -> str:
    """Return a page with its lines, but without code, comments and addresses of links."""
    for pattern in (r"<!--.*?-->", r"(?m)^(```|~~~)(?s:.*?)^\1", r"`[^`]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(f"(?s){pattern}", lambda found: "\n" * found[0].count("\n"), text)
    return text


def _rare_words(texts: dict[str, str]) -> tuple[list[str], float]:
    """List the lines with a rare word, once for each, and return their number in 1,000 words."""
    lines = [
        (f"{name}:{number} {line.strip()}", line)
        for name, text in texts.items()
        for number, line in enumerate(_plain(text).splitlines(), 1)
    ]
    places = [where for where, line in lines for _ in _RARE.findall(line)]
    num_words = sum(len(re.findall(r"[A-Za-z]+", line)) for _, line in lines)
    return places, 1000 * len(places) / num_words


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


def test_rare_words_of_the_users_pages_only_become_fewer() -> None:
    """Page by page there is no limit, so that an ordinary question may have its "what"."""
    places, rate = _rare_words({str(page.relative_to(ROOT)): page.read_text() for page in USERS})
    if round(rate, 1) > RARE_IN_1000:
        rose = f"{rate:.1f} rare words in 1,000, but at most {RARE_IN_1000}: name the noun"
        pytest.fail("\n  ".join([rose, *places]), pytrace=False)
    if rate < _PLAY * RARE_IN_1000:
        pytest.fail(f"well done. Write this line here: RARE_IN_1000 = {rate:.1f}", pytrace=False)


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


def test_rare_words_are_counted_outside_code() -> None:
    page = "# What it is\n\n`what`\n```\nwho\n```\n[a link](#who) to\n<!-- whose -->\nthose, who\n"
    places, rate = _rare_words({"a.md": page})
    assert places == ["a.md:1 # What it is", "a.md:9 those, who", "a.md:9 those, who"]
    assert rate == 1000 * 3 / 8
