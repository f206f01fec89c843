"""What every Comm promises: over threads of one process, and over process groups of several."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import comm_cases
import pytest
from comm_cases import ENDING, HOSTS, PEACEFUL, RANKS, time_out_of

from shoal.comm.threads import run
from shoal.contracts.comm import Comm
from shoal.contracts.launcher import Job
from shoal.core.errors import DeadlinePassed
from shoal_tools.launch.local import Local

CASES = PEACEFUL | ENDING


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """Each rank's error of a case in process groups: one job for all, but for those that end it."""

    @cache
    def errors_of(cases: tuple[str, ...]) -> list[dict[str, str]]:
        out = tmp_path_factory.mktemp("ranks")
        Local().launch(Job((sys.executable, comm_cases.__file__, str(out), *cases), RANKS))
        return [json.loads((out / str(rank)).read_text()) for rank in range(RANKS)]

    def of(case: str) -> list[str]:
        cases = (case,) if case in ENDING else tuple(PEACEFUL)
        return [errors.get(case, "") for errors in errors_of(cases)]

    return of


@pytest.mark.parametrize("case", CASES)
def test_over_threads(case: str) -> None:
    errors = ["did not end"] * RANKS

    def work(comm: Comm) -> None:
        try:
            CASES[case](comm)
            errors[comm.rank] = ""
        except BaseException:
            errors[comm.rank] = traceback.format_exc()

    with suppress(DeadlinePassed, ZeroDivisionError):  # what a rank leaves for
        run(RANKS, work, timeout_s=time_out_of(case), hosts=HOSTS)
    assert errors == [""] * RANKS, "\n".join(errors)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_over_process_groups(case: str, outcome: Callable[[str], list[str]]) -> None:
    errors = outcome(case)
    assert errors == [""] * RANKS, "\n".join(errors)
