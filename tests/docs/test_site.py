"""The site of `make docs`: all pages are in its navigation, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, script

NOT_IN_SITE = {"README.md"}  # of the repository, and of docs/ for who reads the code


def test_every_page_is_in_the_navigation_once() -> None:
    named = re.findall(r"[\w/-]+\.md\b", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2])
    pages = {page.relative_to(ROOT / "docs") for page in PAGES if (ROOT / "docs") in page.parents}
    assert sorted(named) == sorted({str(page) for page in pages} - NOT_IN_SITE)


@pytest.mark.quick
@pytest.mark.parametrize("page", ["index.md", "guide/from-ddp.md"])
def test_what_a_script_becomes_is_what_runs(page: str) -> None:
    """A block of changes cannot run. So each line that is added stands in the page's Python."""
    path = ROOT / "docs" / page
    (changes,) = re.findall(r"(?ms)^```diff\n(.*?)^```$", path.read_text())
    added = [
        line[1:].partition("  #")[0].strip() for line in changes.splitlines() if line[:1] == "+"
    ]
    ran = {line.strip() for line in script(path).splitlines()} | {""}
    assert len(added) > 4
    assert [line for line in added if line not in ran and not line.startswith("shoal.save(")] == []


@pytest.mark.slow
@pytest.mark.processes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A broken link, an anchor that is not there, or a docstring that does not fit is a warning."""
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
