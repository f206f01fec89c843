"""No page and no message tells anybody to install a package called shoal from an index.

No such package is this project's, so whoever takes the name would run code on users' hosts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.contracts.versions import install_shoal

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
# shoal behind a command that installs, or with an extra or a version; "-e ." and paths are right
BY_NAME = re.compile(
    r"(pip3?|uvx?|uv add|pipx|poetry|conda)\b[^\n#]*\b(install|add)\s[^\n#&;]*(?<![\w./-])shoal\b"
    r"|\bshoal(\[\w+\]|==)"
)


def texts() -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".html"}
    folders = ("src", "docs", "examples", "benchmarks")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    return [path for path in found if path.suffix in suffixes or path.name == "Makefile"]


def test_nobody_is_told_to_install_shoal_by_its_name() -> None:
    told = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if BY_NAME.search(line)
    ]
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("line", "by_name"),
    [
        ("pip install shoal", True),
        ("pip install 'shoal[spark]' scikit-learn", True),
        ("uv pip install -U shoal==0.1.0", True),
        ("install shoal[spark] on every executor", True),
        ("pip install -e '.[spark]'  # in a clone of Shoal", False),
        ("pip install ./shoal", False),
        ("pip install -e . && shoal train recipe.py", False),
    ],
)
def test_the_pattern_finds_a_name_and_no_folder(line: str, by_name: bool) -> None:
    assert bool(BY_NAME.search(line)) == by_name


def test_messages_name_a_clone() -> None:
    for text in (install_shoal(), install_shoal("spark"), install_shoal(version="0.1.0")):
        assert "in a clone of Shoal" in text and "pip install -e" in text
        assert not BY_NAME.search(text)
