"""A container's quota is fewer cores than the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.cores import usable_cores


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000\n", 0.5), ("max 100000\n", 7.0), ("", 7.0), (None, 7.0)])
def test_the_quota_counts(quota: str | None, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    monkeypatch.setattr("shoal.core.cores._QUOTA", path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(7)), raising=False)
    assert usable_cores() == cores
