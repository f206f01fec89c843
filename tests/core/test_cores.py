"""A container's quota is read as it is written; without one there is no bound."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shoal.core.cores import bound_cores, quota_cores


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
