"""A limit of open files that is too low is no bug of Shoal's: what is needed is said."""

from __future__ import annotations

import errno
import resource

import pytest

from shoal.comm.beats import Verdict
from shoal.core import open_files
from shoal.core.errors import UsageError
from shoal.core.open_files import check_limit, ran_out
from shoal.front.errors import foreign

WORDS = "pipe: Too many open files"


def limited(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (soft, soft))


def test_a_limit_with_which_ranks_cannot_connect_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limited(monkeypatch, 24)
    with pytest.raises(UsageError, match=r"limit of 24(.|\n)*at least 38(.|\n)*ulimit -n 4096"):
        check_limit(2, "rank 0, host a")
    limited(monkeypatch, 1024)
    check_limit(300, "rank 0, host a")
    limited(monkeypatch, resource.RLIM_INFINITY)
    check_limit(1 << 16, "rank 0, host a")


def test_a_process_that_runs_out_is_no_bug() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    assert ran_out(error) and ran_out(RuntimeError(WORDS)) and not ran_out(OSError("no"))
    said = foreign(error)
    assert "too few files and connections" in said and "ulimit -n 4096" in said
    assert "a bug in it" not in said
    assert "a bug in it" in foreign(ValueError("other"))


def test_an_exchange_that_broke_for_it_names_it() -> None:
    said = str(Verdict("an exchange broke", None, got=WORDS, broke=True).error("rank 0"))
    assert "ulimit -n 4096" in said and "doctor" not in said
