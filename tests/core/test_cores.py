"""A container's quota is read as it is written; without one there is no bound."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.core.cores import CORES, bound_cores, given_cores, quota_cores
from shoal.core.errors import UsageError


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("50000 100000\n", 0.5), ("max 100000\n", math.inf), ("", math.inf), (None, math.inf)],
)
def test_the_quota_counts(
    quota: str | None, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    monkeypatch.setattr("shoal.core.cores._QUOTA", path)
    assert quota_cores() == cores


def test_where_affinity_is_not_told_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert bound_cores() == 7


@pytest.mark.parametrize(("text", "cores"), [("0.25", 0.25), ("2", 2.0), (None, math.inf)])
def test_what_a_launcher_gives_is_read(
    text: str | None, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CORES, raising=False)
    if text is not None:
        monkeypatch.setenv(CORES, text)
    assert given_cores() == cores


@pytest.mark.parametrize("text", ["", "half", "0", "-1", "nan"])
def test_no_number_of_cores_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, text)
    with pytest.raises(UsageError, match="no number of cores"):
        given_cores()
