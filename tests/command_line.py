"""`shoal …` in this process, on threads as ranks, with the tiny recipe."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using
from shoal.profiling import paces
from shoal.session import session
from shoal_tools.cli import main

RECIPE = str(Path(__file__).parent / "tiny_recipe.py")


def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no launcher and no earlier test be seen, and let planning be quick.

    Nothing that commands print depends on how well the paces of exchanges are known.
    """
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "_joined", [])  # which an error in an earlier test has left
    monkeypatch.setattr(paces, "_QUICK_S", 0.02)
    monkeypatch.setattr(paces, "_BUDGET_S", 0.02)


def shoal(*arguments: Any, ranks: int = 1) -> list[int]:
    """Run `shoal ARGUMENTS` on threads as ranks; their exit codes."""

    def work(comm: ThreadComm) -> int:
        with using(comm) if ranks > 1 else nullcontext():
            try:
                main([str(argument) for argument in arguments], prog_name="shoal")
            except SystemExit as ended:
                return int(ended.code or 0)
        raise AssertionError("a command line always exits")

    return run(ranks, work, timeout_s=30)
