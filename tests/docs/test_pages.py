"""Every block of README.md and docs/ holds: Python runs, commands have the options shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from pages import PAGES, ROOT, commands, script

from shoal.contracts.launcher import Job
from shoal_tools.cli import main
from shoal_tools.launch.local import Local

SCRIPTS = {str(page.relative_to(ROOT)): source for page in PAGES if (source := script(page))}
# On one rank README.md is enough for CI: the other pages' code runs on two.
RANKS = [
    pytest.param(page, ranks, marks=[pytest.mark.minutes] * (ranks == 1 and page != "README.md"))
    for ranks in (2, 1)
    for page in SCRIPTS
]
STARTS_RANKS = ("docs/guide/machines.md",)
COMMANDS = [command for page in PAGES for command in commands(page)]


@pytest.mark.processes
@pytest.mark.parametrize(("page", "ranks"), RANKS)
def test_the_python_of_a_page_runs(
    page: str,
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "page.py").write_text(SCRIPTS[page])
    monkeypatch.chdir(tmp_path)
    if page in STARTS_RANKS:  # as a notebook does, which is no rank
        subprocess.run([sys.executable, "page.py"], check=True)
        return
    result = Local().launch(Job((sys.executable, "page.py"), ranks))
    assert result.exit_code == 0, capfd.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_shown_exists(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    for name in re.findall(r"[\w/]+\.py\b", command):
        assert (ROOT / name).exists(), f"{name} does not exist"
    if program == "make":
        assert re.search(rf"(?m)^{arguments[0]}:", (ROOT / "Makefile").read_text())
    if program.endswith("shoal"):
        name, *options = arguments
        chosen = main.commands[name]
        with chosen.make_context(name, options) as context:
            assert isinstance(context, click.Context)


def test_pages_with_blocks_are_found() -> None:
    assert "README.md" in SCRIPTS and len(COMMANDS) >= 8
